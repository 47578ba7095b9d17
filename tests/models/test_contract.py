"""The graph contract by itself: the interface of any part, which the host meets."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from portable_coreml.judge.limits import SYSTEMS, strictest

from models.hosts import host
from shardmill.models import contract, recurrences
from shardmill.models.architecture import LOCAL_ROPE, SLIDING_MASK, Graph, LayerSpec
from shardmill.models.caches import RING, T
from shardmill.models.contract import GraphSpec, has_positions, rope_inputs, states, window_slots
from shardmill.models.layer_constants import layer_constants
from shardmill.models.part_kinds import PART_KINDS, constants, inputs, output, stem
from shardmill.models.parts import MODULES
from shardmill.models.recurrences import RECURRENCES, Mamba2, written

GRAPH = Graph(hidden=64, heads=4, kv_heads=2, head_dim=32, rope_dim=24, ffn=96, rms_norm_eps=1e-5, conv_taps=3)
FULL, LOCAL, BARE = LayerSpec(), LayerSpec(rope=LOCAL_ROPE, mask=SLIDING_MASK), LayerSpec(rope=None)
SLIDING, CONV = LayerSpec(mask=SLIDING_MASK), LayerSpec(mixer="conv")
ROPE = {"rope_cos": (T, 12), "rope_sin": (T, 12)}
ROPE_LOCAL = {"rope_cos_local": (T, 12), "rope_sin_local": (T, 12)}
MASK, MASK_SLIDING = {"attn_mask": (1, 1, T, 48)}, {"attn_mask_sliding": (1, 1, T, 48)}
WRITE = {"kv_write_mask": (1, 1, 48, T)}
RINGS = {"conv_write_mask": (1, 1, T, RING), "conv_read_mask": (1, 2, RING, T)}


def layers(*kinds: LayerSpec, first: int = 5) -> GraphSpec:
    """Layers from `first` on, over 48 slots."""
    return GraphSpec("layers", GRAPH, tuple(enumerate(kinds, start=first)), 48)


@pytest.mark.parametrize(
    ("kinds", "beside_x"),
    [
        pytest.param([FULL, FULL], [ROPE, MASK, WRITE], id="full attention"),
        pytest.param([SLIDING], [ROPE, MASK_SLIDING, WRITE], id="sliding attention"),
        pytest.param([BARE], [MASK, WRITE], id="no rotary embedding"),
        pytest.param([BARE, FULL], [ROPE, MASK, WRITE], id="on some layers only"),
        pytest.param([LOCAL, FULL], [ROPE, ROPE_LOCAL, MASK, MASK_SLIDING, WRITE], id="two tables and two masks"),
        pytest.param([LOCAL], [ROPE_LOCAL, MASK_SLIDING, WRITE], id="the second table only"),
        pytest.param([CONV, CONV], [RINGS], id="convolutions only"),
        pytest.param([CONV, FULL], [ROPE, MASK, WRITE, RINGS], id="convolutions and attention"),
    ],
)
def test_a_part_has_the_inputs_that_its_layers_use_in_one_order(
    kinds: list[LayerSpec], beside_x: list[dict[str, Any]]
) -> None:
    """Also however the layers are ordered: the order is that of the program's inputs."""
    expected = [("x", (1, 64, T, 1)), *(item for group in beside_x for item in group.items())]
    assert list(inputs(layers(*kinds)).items()) == expected
    assert list(inputs(layers(*reversed(kinds))).items()) == expected
    assert all(shape.count(T) == 1 for shape in inputs(layers(*kinds)).values())


def test_states_are_named_by_absolute_layer_and_kind() -> None:
    pair = (1, 2, 48, 32)
    expected = [("k_5", pair), ("v_5", pair), ("c_6", (1, 1, 64, RING)), ("k_7", pair), ("v_7", pair)]
    assert list(states(layers(FULL, CONV, LOCAL)).items()) == expected
    assert output(layers(CONV)) == "hidden"


def test_only_slots_of_the_whole_context_are_positions() -> None:
    """Neither a ring of keys and values is, nor one of a convolution, nor any other kind of state of that size."""
    part = replace(layers(FULL, CONV, SLIDING), window_slots=32)
    found = {name: has_positions(name, shape, part.slots) for name, shape in states(part).items()}
    assert found == {"k_5": True, "v_5": True, "c_6": False, "k_7": False, "v_7": False}
    assert not has_positions("s_5", (1, 2, 48, 32), 48)


def test_a_head_has_one_input_one_output_and_no_state() -> None:
    head = GraphSpec("head", GRAPH, rows=200)
    assert (inputs(head), states(head), output(head)) == ({"hidden": (1, 64, T, 1)}, {}, "logits")
    assert list(constants(head).items()) == [("norm.weight", (64,)), ("lm_head.weight", (200, 64))]


def test_every_kind_of_part_has_its_module_and_is_in_the_published_schema() -> None:
    """A new one is in three places; an encoder's parts have a schema of their own."""
    schema = json.loads((Path(__file__).parents[2] / "docs/model.schema.json").read_text())
    kinds = schema["properties"]["parts"]["items"]["properties"]["kind"]["enum"]
    assert PART_KINDS.keys() == MODULES.keys() == {*kinds, "encoder"}


def test_the_narrowest_state_is_as_wide_as_the_neural_engine_asks() -> None:
    """Rule S8: 32 elements along the last axis."""
    assert all(shape[-1] >= 32 for shape in states(layers(FULL, CONV)).values())


def test_names_of_rotary_inputs_keep_the_table_s_own_at_the_end() -> None:
    assert rope_inputs("rope") == ("rope_cos", "rope_sin")
    assert rope_inputs("rope_local") == ("rope_cos_local", "rope_sin_local")


def names(spec: GraphSpec, index: int) -> list[str]:
    """Constants of a layer without their common prefix."""
    prefix = f"layers.{index}."
    return [path.removeprefix(prefix) for path in constants(spec) if path.startswith(prefix)]


def test_constants_of_a_part_are_its_layers_in_order() -> None:
    spec = layers(FULL, CONV)
    assert list(constants(spec)) == [f"layers.{i}.{name}" for i in (5, 6) for name in names(spec, i)]
    assert stem("layers.5.mlp.down_proj.weight") == "layers_5_mlp_down_proj_weight"


SEPARATE = {"q_proj.weight": (128, 64), "k_proj.weight": (64, 64), "v_proj.weight": (64, 64)}
OUT = {"o_proj.weight": (64, 128)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, SEPARATE | OUT),
        ({"fused": True}, {"qkv_proj.weight": (256, 64)} | OUT),
        ({"qkv_bias": True}, SEPARATE | OUT | {"q_proj.bias": (128,), "k_proj.bias": (64,), "v_proj.bias": (64,)}),
        ({"o_bias": True}, SEPARATE | OUT | {"o_proj.bias": (64,)}),
        ({"qk_norm": "before"}, SEPARATE | OUT | {"q_norm.weight": (32,), "k_norm.weight": (32,)}),
        ({"qk_norm": "after"}, SEPARATE | OUT | {"q_norm.weight": (32,), "k_norm.weight": (32,)}),
        ({"qk_norm": "wide"}, SEPARATE | OUT | {"q_norm.weight": (128,), "k_norm.weight": (64,)}),
    ],
)
def test_attention_has_the_constants_of_its_options(change: dict[str, Any], expected: dict[str, Any]) -> None:
    found = layer_constants(replace(GRAPH, **change), FULL)
    assert {n: s for n, s in found.items() if "self_attn" in n} == {f"self_attn.{n}": s for n, s in expected.items()}


def test_a_feed_forward_has_the_constants_of_its_options() -> None:
    plain, fused = (layer_constants(replace(GRAPH, fused=f, mlp_bias=f), FULL) for f in (False, True))
    assert {n: s for n, s in plain.items() if n.startswith("mlp.")} == {
        "mlp.gate_proj.weight": (96, 64),
        "mlp.up_proj.weight": (96, 64),
        "mlp.down_proj.weight": (64, 96),
    }
    assert {n: s for n, s in fused.items() if n.startswith("mlp.")} == {
        "mlp.gate_up_proj.weight": (192, 64),
        "mlp.gate_up_proj.bias": (192,),
        "mlp.down_proj.weight": (64, 96),
        "mlp.down_proj.bias": (64,),
    }


NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@pytest.mark.parametrize(("pre", "post", "kept"), [(True, False, (0, 1)), (False, True, (1, 3)), (True, True, NORMS)])
def test_a_layer_has_the_norms_that_its_family_has(pre: bool, post: bool, kept: Any) -> None:
    found = layer_constants(replace(GRAPH, pre_norms=pre, post_norms=post), FULL)
    wanted = {f"{name if isinstance(name, str) else NORMS[name]}.weight" for name in kept}
    assert {name for name in found if "layernorm" in name} == wanted


def test_a_convolution_has_a_constant_for_each_tap_and_no_attention() -> None:
    found = layer_constants(GRAPH, CONV)
    assert {n: s for n, s in found.items() if n.startswith("conv.")} == {
        "conv.in_proj.weight": (192, 64),
        "conv.tap_0": (64,),
        "conv.tap_1": (64,),
        "conv.tap_2": (64,),
        "conv.out_proj.weight": (64, 64),
    }
    assert not any("self_attn" in name for name in found)


def test_a_ring_is_there_where_it_saves_slots() -> None:
    assert [window_slots(window, 4, 2048) for window in (None, 1, 29, 30, 512, 2013, 2014, 4096)] == [
        *(0, 32, 32, 64, 544),
        *(2016, 0, 0),
    ]
    full, sliding = replace(layers(FULL), window_slots=32), replace(layers(LOCAL), window_slots=32)
    assert inputs(full) == inputs(layers(FULL)) and states(full) == states(layers(FULL))
    assert {*states(sliding).values()} == {(1, 2, 32, 32)} and inputs(sliding)["attn_mask_sliding"] == (1, 1, T, 32)
    assert "kv_write_mask" not in inputs(sliding)


@pytest.mark.parametrize(("window", "taps", "ring"), [(None, 0, 0), (8, 0, 0), (None, 3, 0), (8, 3, 0), (8, 3, 32)])
def test_the_host_makes_every_array_that_a_form_takes_in_its_shape(window: int | None, taps: int, ring: int) -> None:
    kinds = [FULL, *([LOCAL] if window else []), *([CONV] if taps else [])]
    table = {"inv_freq": [1.0] * 12, "scale": 1.0}
    found = host(window=window, taps=taps, ring=ring, rope=table, rope_local=table).arrays([0, 1, 2], [0, 1, 2])
    for name, shape in inputs(replace(layers(*kinds), window_slots=ring)).items():
        if name != "x":
            assert found[name].shape == tuple(3 if extent == T else extent for extent in shape)
            assert found[name].dtype == np.float32


def test_a_further_recurrence_changes_no_file_of_a_model_that_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each part's file would have one more null, and every model would be converted again."""
    before = asdict(GRAPH, dict_factory=written)
    assert {name: before[name] for name in ("delta", "mamba")} == {"delta": None, "mamba": None}
    monkeypatch.setattr(recurrences, "RECURRENCES", {**RECURRENCES, "later": Mamba2})
    assert written([*vars(GRAPH).items(), ("later", None)]) == before
    assert written([("later", {"taps": 4})]) == {"later": {"taps": 4}}


def test_a_product_has_as_many_scores_as_the_strictest_system_takes() -> None:
    assert strictest(SYSTEMS).scores.most == contract.MOST_SCORES
