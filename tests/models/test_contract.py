"""The graph contract by itself: the interface of a part of any form, and the host's side of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from shardmill.models.architecture import LOCAL_ROPE, SLIDING_MASK, Graph, Kind
from shardmill.models.contract import (
    MASKED,
    NEVER,
    RING,
    Floats,
    Form,
    Host,
    T,
    attention_mask,
    constants,
    inputs,
    layer_constants,
    output,
    rope_inputs,
    rope_tables,
    states,
    stem,
    window_slots,
    write_mask,
)

GRAPH = Graph(hidden=64, heads=4, kv_heads=2, head_dim=32, rope_dim=24, ffn=96, rms_norm_eps=1e-5, conv_taps=3)
FULL, LOCAL, BARE = Kind(), Kind(rope=LOCAL_ROPE, mask=SLIDING_MASK), Kind(rope=None)
SLIDING, CONV = Kind(mask=SLIDING_MASK), Kind(mixer="conv")
ROPE = {"rope_cos": (T, 12), "rope_sin": (T, 12)}
ROPE_LOCAL = {"rope_cos_local": (T, 12), "rope_sin_local": (T, 12)}
MASK, MASK_SLIDING = {"attn_mask": (1, 1, T, 48)}, {"attn_mask_sliding": (1, 1, T, 48)}
WRITE = {"kv_write_mask": (1, 1, 48, T)}
RINGS = {"conv_write_mask": (1, 1, T, RING), "conv_read_mask": (1, 2, RING, T)}


def layers(*kinds: Kind, first: int = 5) -> Form:
    """Layers from `first` on, over 48 slots."""
    return Form("layers", GRAPH, tuple(enumerate(kinds, start=first)), 48)


# Interfaces.


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
    kinds: list[Kind], beside_x: list[dict[str, Any]]
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


def test_a_head_has_one_input_one_output_and_no_state() -> None:
    head = Form("head", GRAPH, rows=200)
    assert (inputs(head), states(head), output(head)) == ({"hidden": (1, 64, T, 1)}, {}, "logits")
    assert list(constants(head).items()) == [("norm.weight", (64,)), ("lm_head.weight", (200, 64))]


def test_the_narrowest_state_is_as_wide_as_the_neural_engine_asks() -> None:
    """Rule S8: 32 elements along the last axis."""
    assert all(shape[-1] >= 32 for shape in states(layers(FULL, CONV)).values())


def test_names_of_rotary_inputs_keep_the_table_s_own_at_the_end() -> None:
    assert rope_inputs("rope") == ("rope_cos", "rope_sin")
    assert rope_inputs("rope_local") == ("rope_cos_local", "rope_sin_local")


def names(form: Form, index: int) -> list[str]:
    """Constants of a layer without their common prefix."""
    prefix = f"layers.{index}."
    return [path.removeprefix(prefix) for path in constants(form) if path.startswith(prefix)]


def test_constants_of_a_part_are_its_layers_in_order() -> None:
    form = layers(FULL, CONV)
    assert list(constants(form)) == [f"layers.{i}.{name}" for i in (5, 6) for name in names(form, i)]
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


# The host.


def host(slots: int = 48, window: int | None = None, taps: int = 0, ring: int = 0, **tables: Any) -> Host:
    return Host({"context": slots, "rope": tables, "window": window, "window_slots": ring, "conv_taps": taps})


def test_tables_are_named_after_the_inputs_and_read_at_the_positions() -> None:
    """Positions, not slots: a sliding context has other ones."""
    global_, local = {"inv_freq": [1.0, 0.1], "scale": 1.2}, {"inv_freq": [0.5, 0.3], "scale": 1.0}
    found = host(rope=global_, rope_local=local).arrays([7, 0], [3, 4])
    angles = np.array([[3.0], [4.0]])
    np.testing.assert_allclose(found["rope_cos"], 1.2 * np.cos(angles * [1.0, 0.1]), rtol=1e-6)
    np.testing.assert_allclose(found["rope_sin"], 1.2 * np.sin(angles * [1.0, 0.1]), rtol=1e-6)
    np.testing.assert_allclose(found["rope_cos_local"], np.cos(angles * [0.5, 0.3]), rtol=1e-6)
    np.testing.assert_allclose(found["rope_sin_local"], np.sin(angles * [0.5, 0.3]), rtol=1e-6)


def test_tables_hold_as_many_positions_as_there_are_slots() -> None:
    rope = {"inv_freq": [1.0], "scale": 1.0}
    runtime = {"context": 4, "rope": {"rope": rope}, "window": None, "window_slots": 0, "conv_taps": 0}
    assert len(Host(runtime).tables["rope_cos"]) == 4
    assert rope_tables(rope, 2)[0].dtype == np.float32


@pytest.mark.parametrize(("window", "taps", "ring"), [(None, 0, 0), (8, 0, 0), (None, 3, 0), (8, 3, 0), (8, 3, 32)])
def test_the_host_makes_every_array_that_a_form_takes_in_its_shape(window: int | None, taps: int, ring: int) -> None:
    kinds = [FULL, *([LOCAL] if window else []), *([CONV] if taps else [])]
    table = {"inv_freq": [1.0] * 12, "scale": 1.0}
    found = host(window=window, taps=taps, ring=ring, rope=table, rope_local=table).arrays([0, 1, 2], [0, 1, 2])
    for name, shape in inputs(replace(layers(*kinds), window_slots=ring)).items():
        if name != "x":
            assert found[name].shape == tuple(3 if extent == T else extent for extent in shape)
            assert found[name].dtype == np.float32


@pytest.mark.parametrize("window", [None, 1, 2, 5, 48])
def test_masks_are_those_of_transformers(window: int | None) -> None:
    """A window of w positions includes the token's own, so its edge shows an error of one."""
    sees = sliding_window_causal_mask_function(window) if window else causal_mask_function
    positions = np.arange(12)
    mask = attention_mask(np.arange(48), positions, window)
    assert mask.shape == (1, 1, 12, 48) and mask.dtype == np.float32
    for q in positions:
        for kv in range(48):
            visible = bool(sees(torch.tensor(0), torch.tensor(0), torch.tensor(int(q)), torch.tensor(kv)))
            assert mask[0, 0, q, kv] == (0 if visible else MASKED)


def test_masks_are_finite_and_exactly_those_of_the_contract() -> None:
    held = np.array([0, 3, NEVER, 1])
    mask = attention_mask(held, np.array([0, 1, 5]))
    assert mask.shape == (1, 1, 3, 4)
    assert mask[0, 0].tolist() == [[0, -1e4, -1e4, -1e4], [0, -1e4, -1e4, 0], [0, 0, -1e4, 0]]
    narrow = attention_mask(held, np.array([0, 1, 5]), 2)
    assert narrow[0, 0].tolist() == [[0, -1e4, -1e4, -1e4], [0, -1e4, -1e4, 0], [-1e4] * 4]
    written = write_mask(4, np.array([2, 0, 3]))
    assert written.shape == (1, 1, 4, 3)
    assert written[0, 0].tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1]]


def test_a_slot_is_seen_by_the_position_it_was_last_written_with() -> None:
    """Rejected drafts are hidden by their positions until their slots are written again."""
    h = host(slots=6)
    h.arrays([0, 1, 2, 3], [0, 1, 2, 3])
    seen = h.arrays([4], [2])["attn_mask"][0, 0, 0] == 0  # 2 again, elsewhere: 2 and 3 were rejected
    assert seen.tolist() == [True, True, True, False, True, False]
    h.forget([2, 3])
    seen = h.arrays([5], [3])["attn_mask"][0, 0, 0] == 0
    assert seen.tolist() == [True, True, False, False, True, True]
    assert h.held.tolist() == [0, 1, NEVER, NEVER, 2, 3]
    h.reset()
    assert (h.held == NEVER).all()
    assert (h.arrays([3], [0])["attn_mask"][0, 0, 0] == 0).tolist() == [False, False, False, True, False, False]


def test_the_sliding_mask_counts_positions_not_slots() -> None:
    h = host(slots=6, window=2)
    h.arrays([5, 4, 3], [0, 1, 2])
    found = h.arrays([0], [3])
    assert (found["attn_mask"][0, 0, 0] == 0).tolist() == [True, False, False, True, True, True]
    assert (found["attn_mask_sliding"][0, 0, 0] == 0).tolist() == [True, False, False, True, False, False]
    assert "attn_mask_sliding" not in host(slots=6).arrays([0], [0])


# The sliding layers' ring.


class Cache:
    """A cache of the tokens themselves, written by the host's masks."""

    def __init__(self, slots: int, write: str) -> None:
        self.tokens, self.write = np.zeros(slots), write

    def sees(self, arrays: Mapping[str, Floats], tokens: Sequence[int]) -> list[list[int]]:
        """Writes tokens; what each of them sees, sorted."""
        written = arrays[self.write][0, 0]  # [slots, T]
        self.tokens = self.tokens * (1 - written.sum(axis=1)) + written @ np.asarray(tokens)
        return [sorted(self.tokens[row == 0]) for row in arrays["attn_mask_sliding"][0, 0]]


@pytest.mark.parametrize("window", [1, 2, 5, 28, 29, 30, 60])
@pytest.mark.parametrize("seed", range(3))
def test_a_ring_shows_a_sliding_layer_what_all_slots_would(window: int, seed: int) -> None:
    """With drafts that are rejected. At a window of 29 the ring has no slot to spare."""
    rng, slots, start = np.random.default_rng(seed), 200, 0
    ring = window_slots(window, 4, slots)
    hosts = host(slots, window), host(slots, window, ring=ring)
    caches = Cache(slots, "kv_write_mask"), Cache(ring, "kv_write_mask_sliding")
    while start < 190:
        at = list(range(start, start + int(rng.integers(1, 5))))
        tokens = rng.integers(1, 10**6, len(at)).tolist()
        whole, few = (c.sees(h.arrays(at, at), tokens) for c, h in zip(caches, hosts, strict=True))
        assert few == whole and len(few[-1]) == min(window, at[-1] + 1)
        start += int(rng.integers(1, len(at) + 1))
        assert all(h.rewindable(start) for h in hosts)


def test_a_ring_is_there_where_it_saves_slots() -> None:
    assert [window_slots(window, 4, 2048) for window in (None, 1, 29, 30, 512, 2013, 2014, 4096)] == [
        *(0, 32, 32, 64, 544),
        *(2016, 0, 0),
    ]
    full, sliding = replace(layers(FULL), window_slots=32), replace(layers(LOCAL), window_slots=32)
    assert inputs(full) == inputs(layers(FULL)) and states(full) == states(layers(FULL))
    assert {*states(sliding).values()} == {(1, 2, 32, 32)} and inputs(sliding)["attn_mask_sliding"] == (1, 1, T, 32)
    assert "kv_write_mask" not in inputs(sliding)


def test_what_a_ring_lost_is_not_made_up() -> None:
    """Too far back, and so the text has to be fed again; forgotten slots are lost on purpose."""
    h = host(200, window=20, ring=32)
    for start in range(0, 40, 4):
        at = list(range(start, start + 4))
        h.arrays(at, at)
    assert h.rewindable(27) and not h.rewindable(26) and h.rewindable(0)
    with pytest.raises(ValueError, match="position 7 is no longer in the sliding layers' ring of 32; feed it again"):
        h.arrays([26], [26])
    assert h.recent.tolist() == [*range(32, 40), *range(8, 32)]  # refused, so nothing is marked
    h.forget([38, 39])
    assert (h.arrays([40], [40])["attn_mask_sliding"] == 0).sum() == 18
    h.reset()
    assert h.rewindable(0) and (h.arrays([0], [0])["attn_mask_sliding"] == 0).sum() == 1


# The convolutions' ring.


class Ring:
    """A ring of the inputs themselves, written and read by the host's masks."""

    def __init__(self, taps: int) -> None:
        self.host, self.taps = host(slots=512, taps=taps), taps
        self.kept = np.full(RING, -1.0)

    def read(self, positions: Sequence[int], tokens: Sequence[float]) -> list[list[float]]:
        """For each token what it reads 1, 2, ... positions back; each input is its token's number plus 1."""
        found = self.host.arrays(positions, positions)
        write, read = found["conv_write_mask"][0, 0], found["conv_read_mask"][0]  # [T, R], [L - 1, R, T]
        assert set(np.unique(write)) <= {0, 1} and (write.sum(1) == 1).all() and write.sum(0).max() == 1
        self.kept = self.kept * (1 - write.sum(0)) + (np.asarray(tokens) + 1) @ write
        return [[float(self.kept @ read[back, :, t]) for back in range(self.taps - 1)] for t in range(len(positions))]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 4), st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=30))
def test_a_convolution_reads_the_accepted_tokens_before_its_own(taps: int, passes: list[tuple[int, int]]) -> None:
    """After any passes with any of their tokens rejected, for longer than the ring is."""
    ring, text = Ring(taps), list[float]()
    number = 0.0
    for width, accepted in passes:
        first, fed = len(text), [number + i for i in range(width)]
        number += width
        assert ring.host.rewindable(first)
        after = text + fed
        expected = [
            [after[p - back] + 1 if p >= back else 0 for back in range(1, taps)] for p in range(first, len(after))
        ]
        assert ring.read(range(first, len(after)), fed) == expected
        text += fed[: min(accepted, width)]


@given(st.integers(2, 4), st.integers(1, 120), st.integers(0, 140))
@settings(max_examples=100, deadline=None)
def test_rewindable_says_whether_the_ring_still_holds_what_is_needed(taps: int, fed: int, position: int) -> None:
    h = host(slots=512, taps=taps)
    for p in range(fed):
        h.arrays([p], [p])
    oldest = max(position - taps + 1, 0)  # that it reads; position 0 reads none
    sound = position == 0 or (position <= fed and oldest >= fed - RING)
    assert h.rewindable(position) == sound
    if sound:
        h.arrays([position], [position])
    else:
        with pytest.raises(ValueError, match=rf"is no longer in the convolutions' ring of {RING}"):
            h.arrays([position], [position])


def test_a_refused_pass_leaves_no_mark() -> None:
    """Nothing of it was written, so nothing of it may be taken for written."""
    h = host(slots=512, taps=3)
    h.arrays(range(20), range(20))
    before = h.held.copy(), h.ring.copy()
    with pytest.raises(ValueError, match="position 99 is no longer"):
        h.arrays([100], [100])
    assert (h.held == before[0]).all() and (h.ring == before[1]).all()


def test_reset_forgets_the_ring() -> None:
    h = host(slots=512, taps=3)
    h.arrays(range(8), range(8))
    assert h.rewindable(8)
    h.reset()
    assert not h.rewindable(8) and h.rewindable(0)


def test_without_convolutions_every_position_is_rewindable() -> None:
    h = host()
    h.arrays([0], [0])
    assert h.rewindable(40)
    assert not any(name.startswith("conv") for name in h.arrays([1], [1]))
