"""Phi-3 as transformers has it: the same tensors, the same frequencies, the same layer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import limits
import pytest
import tiny
import torch
from transformers import Phi3Config, Phi3ForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer, Phi3RotaryEmbedding

from shardmill import plan
from shardmill.errors import CheckpointError, ConfigError
from shardmill.models import family
from shardmill.models.architecture import SLIDING_MASK
from shardmill.models.contract import GraphSpec
from shardmill.models.families import phi3
from shardmill.models.hf_config import load_hf_config
from shardmill.models.parts import build
from shardmill.models.rotary import rope


def numbers(**changes: Any) -> dict[str, Any]:
    """A small config with two key/value heads for six query heads."""
    plain = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    return {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 64,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 128,
        "rope_parameters": plain,
        "sliding_window": None,
        **changes,
    }


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_are_those_that_transformers_saves(tied: bool) -> None:
    config = tiny.hf_config(tied=tied)
    shapes = plan.tensor_shapes(phi3.describe(config, 64))
    state = {name: tuple(t.shape) for name, t in Phi3ForCausalLM(config).state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    assert shapes == state


@pytest.mark.parametrize(("context", "factors"), [(64, "short"), (65, "long"), (200, "long")])
def test_longrope_is_transformers_for_a_sequence_of_that_length(context: int, factors: str) -> None:
    config = tiny.hf_config()
    found = rope(config, context)
    rotary = Phi3RotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(context)[None])
    angles = torch.arange(context)[:, None].float() * torch.tensor(found.inv_freq)
    torch.testing.assert_close(angles.cos() * found.scale, cos[0, :, : tiny.ROPE_DIM // 2])
    torch.testing.assert_close(angles.sin() * found.scale, sin[0, :, : tiny.ROPE_DIM // 2])
    assert (found.factors, found.dim) == (factors, tiny.ROPE_DIM)


def test_the_attention_factor_is_that_of_phi_4_mini() -> None:
    """sqrt(1 + ln(131072 / 4096) / ln(4096)) = 1.19024, which the public port of this model leaves out."""
    config = tiny.hf_config(original=4096)
    config.max_position_embeddings = 131072
    factor = math.sqrt(1 + math.log(32) / math.log(4096))
    assert rope(config, 1024).scale == pytest.approx(factor) and round(factor, 5) == 1.19024


def test_plain_rotary_has_no_factor() -> None:
    found = rope(Phi3Config(**numbers()), 64)
    assert (found.scale, found.factors, found.dim) == (1.0, "default", 24)
    assert found.inv_freq[1] == pytest.approx(10000 ** (-2 / 24))


def test_both_generations_of_config_are_read_alike(tmp_path: Path) -> None:
    """`rope_scaling` with the numbers beside it, and transformers 5's `rope_parameters`."""
    tiny.hf_config().save_pretrained(tmp_path / "new")
    content = json.loads((tmp_path / "new" / "config.json").read_text())
    parameters = content.pop("rope_parameters")
    content |= {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor")}
    content["rope_scaling"] = {"type": "longrope", "short_factor": tiny.SHORT, "long_factor": tiny.LONG}
    content["original_max_position_embeddings"] = tiny.ORIGINAL
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(content))
    old, new = (phi3.describe(load_hf_config(tmp_path / name), 64) for name in ("old", "new"))
    assert old == new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': programs have .*silu.* only"),
        ({"max_position_embeddings": 32}, "context 64 is over the model's 32 positions; lower context"),
        ({"num_key_value_heads": 4}, "6 heads are no multiple of 4 key/value heads"),
    ],
)
def test_what_the_graph_has_no_place_for_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        phi3.describe(Phi3Config(**numbers(**change)), 64)


@pytest.mark.parametrize(("window", "slides"), [(None, False), (64, False), (65, False), (63, True), (32, True)])
def test_a_window_as_wide_as_the_context_is_no_window(window: int | None, slides: bool) -> None:
    found = phi3.describe(Phi3Config(**numbers(sliding_window=window)), 64).architecture
    assert found.layers == 2
    assert {kind.mask == SLIDING_MASK for kind in found.kinds} == {slides}
    assert found.window == (window if slides else None)


def test_an_unknown_family_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"model_type 'gpt2' is not supported; supported: .*phi3"):
        family("gpt2")
    assert family("phi3") is phi3


def test_an_unreadable_config_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "phi3", "rms_norm_eps": "x"}')
    with pytest.raises(CheckpointError, match=r"config\.json can't be read as a model config: [^\n]+$"):
        load_hf_config(tmp_path)


@pytest.fixture(scope="module")
def layer() -> tuple[Any, Any]:
    """transformers' layer with two key/value heads, and our part of the same weights."""
    torch.manual_seed(0)
    config = Phi3Config(**numbers())
    config._attn_implementation = "eager"
    theirs = Phi3DecoderLayer(config, 0).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(1 + 0.3 * torch.randn_like(weight) if weight.ndim == 1 else 0.15 * torch.randn_like(weight))
    weights = {f"layers.0.{name}": t.detach() for name, t in theirs.state_dict().items()}
    found = phi3.describe(config, 16).architecture
    return theirs, lambda: build(GraphSpec("layers", found.graph, ((0, found.kinds[0]),), 16), weights)


@pytest.mark.parametrize("widths", [[4], [1, 1, 1, 1], [1, 3], [3, 1]])
def test_a_part_is_transformers_layer_for_grouped_heads(layer: tuple[Any, Any], widths: list[int]) -> None:
    """Two key/value heads: the order of query heads within their groups shows."""
    theirs, ours = layer[0], layer[1]()
    x = torch.randn(1, 4, 96, generator=torch.Generator().manual_seed(2))
    angles = torch.arange(4)[:, None] * torch.tensor([10000 ** (-2 * i / 24) for i in range(12)])
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
    causal = torch.full((1, 1, 4, 4), -1e4).triu(1)
    with torch.no_grad():
        expected = theirs(x, attention_mask=causal, position_embeddings=both)
        expected = expected[0] if isinstance(expected, tuple) else expected
        rows, first = [], 0
        for width in widths:
            at = torch.arange(first, first + width)
            mask = torch.where(torch.arange(16)[None] <= at[:, None], 0.0, -1e4)[None, None]
            written = (torch.arange(16)[:, None] == at[None]).float()[None, None]
            rows.append(ours(x[:, at].transpose(1, 2)[..., None], cos[at], sin[at], mask, written))
            first += width
    out = torch.cat(rows, dim=2)[..., 0].transpose(1, 2)
    limits.rows_agree(f"widths {widths}", out, expected, limits.model(1, 128))
    assert ours.k_0[:, :, 4:].abs().max() == 0
    assert ours.k_0[:, :, :4].abs().min(dim=-1).values.max() > 0
