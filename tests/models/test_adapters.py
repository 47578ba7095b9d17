"""Which models take adapters as inputs, and how the inputs of a part are laid out."""

from __future__ import annotations

from shardmill import models
from shardmill.models.adapters import adapter_inputs, slices, unadaptable
from shardmill.models.architecture import Architecture

from .tiny_configs import TINY, tiny_config
from .tiny_families import SLOTS

RECURRENT = "a recurrence, or queries and gates in one matrix"
REFUSED = {
    "gemma4": "without projections for keys or values",
    "gemma4_text": "without projections for keys or values",
    "gemma4_unified": "without projections for keys or values",
    "gemma4_unified_text": "without projections for keys or values",
    "zaya": "convolutions between its projections",
}


def architecture(model_type: str) -> Architecture:
    config = tiny_config(model_type).get_text_config()
    found: Architecture = models.family(model_type).describe(config, SLOTS).architecture
    return found


def test_models_that_can_not_take_adapters_say_why() -> None:
    described = {model_type: architecture(model_type) for model_type in TINY}
    recurrent = {name for name, a in described.items() if any(kind.recurs for kind in a.kinds)}
    assert {"granitemoehybrid", "nemotron_h", "qwen3_5", "qwen3_5_moe"} < recurrent
    said = {model_type: why for model_type, a in described.items() if (why := unadaptable(a))}
    refused = REFUSED | dict.fromkeys(recurrent, RECURRENT)
    assert said.keys() == refused.keys()
    assert [model_type for model_type, why in refused.items() if why not in said[model_type]] == []


def test_layers_have_slices_only_of_what_they_have() -> None:
    """LFM2 has convolutions in place of attention in three of four layers, and an MLP in each."""
    a = architecture("lfm2")
    layers = tuple(enumerate(a.kinds))
    shapes = adapter_inputs(a.graph, layers, 5)
    heads, keys = a.graph.heads * a.graph.head_dim, a.graph.kv_heads * a.graph.head_dim
    assert shapes == {
        "adapter_attn": (1, 1, 20, a.graph.hidden),
        "adapter_ffn": (1, 4, 15, a.graph.ffn),
        "adapter_key_value": (1, 1, 10, keys),
        "adapter_mlp": (1, 4, 15, a.graph.hidden),
        "adapter_query": (1, 1, 10, heads),
    }
    assert set(slices(a.graph, layers, 5)) == {"adapter_attn_2", "adapter_key_value_2", "adapter_query_2"} | {
        f"adapter_{name}_{i}" for name in ("ffn", "mlp") for i in range(4)
    }
    assert adapter_inputs(a.graph, layers, 0) == slices(a.graph, layers, 0) == {}


def test_an_mlp_without_a_gate_has_fewer_rows() -> None:
    a = architecture("nemotron")
    shapes = adapter_inputs(a.graph, tuple(enumerate(a.kinds)), 4)
    assert shapes["adapter_ffn"] == (1, a.layers, 8, a.graph.ffn)
