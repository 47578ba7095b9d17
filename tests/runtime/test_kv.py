"""The host's side of a pass by itself: rotary rows, masks, and which position is in each slot."""

from __future__ import annotations

import limits
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_encoders
from models.hosts import host
from models.tiny_families import limit_of
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from shardmill.runtime.kv import MASKED, NEVER, KVLayout, attention_mask, rope_rows, rope_tables, write_mask
from shardmill.runtime.pack import apart, bucket_for, columns, encoder_arrays, encoder_mask, packed_texts


def test_tables_are_named_after_the_inputs_and_read_at_the_positions() -> None:
    """Positions, not slots: a sliding context has other ones."""
    global_, local = {"inv_freq": [1.0, 0.1], "scale": 1.2}, {"inv_freq": [0.5, 0.3], "scale": 1.0}
    found = host(rope=global_, rope_local=local).arrays([7, 0], [3, 4])
    angles = np.array([[3.0], [4.0]])
    for name, steps, scale in (("rope", [1.0, 0.1], 1.2), ("rope_local", [0.5, 0.3], 1.0)):
        suffix = name.removeprefix("rope")
        for table, function in ((f"rope_cos{suffix}", np.cos), (f"rope_sin{suffix}", np.sin)):
            limits.numbers_agree(table, found[table], scale * function(angles * steps), limits.roundings("fp32", 4))


def test_tables_hold_as_many_positions_as_there_are_slots() -> None:
    rope = {"inv_freq": [1.0], "scale": 1.0}
    runtime = {"context": 4, "rope": {"rope": rope}, "window": None, "window_slots": 0, "conv_taps": 0}
    assert len(KVLayout(runtime).tables["rope_cos"]) == 4
    assert rope_tables(rope, 2)[0].dtype == np.float32


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


def test_a_forgotten_slot_is_hidden_in_a_ring_too() -> None:
    h = host(window=4, ring=8)
    h.arrays(range(5), range(5))
    h.forget([3])
    found = h.arrays([5], [5])
    assert np.flatnonzero(found["attn_mask_sliding"][0, 0, 0] == 0).tolist() == [2, 4, 5]
    assert np.flatnonzero(found["attn_mask"][0, 0, 0] == 0).tolist() == [0, 1, 2, 4, 5]


def test_the_sliding_mask_counts_positions_not_slots() -> None:
    h = host(slots=6, window=2)
    h.arrays([5, 4, 3], [0, 1, 2])
    found = h.arrays([0], [3])
    assert (found["attn_mask"][0, 0, 0] == 0).tolist() == [True, False, False, True, True, True]
    assert (found["attn_mask_sliding"][0, 0, 0] == 0).tolist() == [True, False, False, True, False, False]
    assert "attn_mask_sliding" not in host(slots=6).arrays([0], [0])


@pytest.mark.parametrize("ring", [0, 8])
def test_a_pass_that_is_written_nowhere_sees_the_positions_before_its_own(ring: int) -> None:
    """A slot that already holds its position, from a draft that was rejected, stays hidden; so do later ones."""
    h = host(window=3, ring=ring)
    h.arrays(list(range(7)), list(range(7)))
    found, seen = h.before(5), host(window=3, ring=ring)
    assert np.flatnonzero(found["attn_mask"][0, 0, 0] == 0).tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(found["attn_mask_sliding"][0, 0, 0] == 0).tolist() == [3, 4]  # two, and itself
    seen.arrays(list(range(5)), list(range(5)))
    after = seen.arrays([5], [5])
    for name in ("attn_mask", "attn_mask_sliding"):  # what a pass that is written sees beside itself
        after[name][..., 5] = MASKED
        assert np.array_equal(found[name], after[name]), name
    assert np.array_equal(h.held[:7], range(7))


def test_a_context_that_grows_keeps_every_slot() -> None:
    """The last one too; what a shorter context has no slot for is forgotten."""
    h = host(slots=16)
    h.resize(8)
    h.arrays(list(range(8)), list(range(8)))
    h.resize(16)
    mask = h.arrays([8], [8])["attn_mask"][0, 0, 0]
    assert len(mask) == 16 and np.flatnonzero(mask == 0).tolist() == list(range(9))
    h.resize(4)
    h.resize(16)
    assert np.flatnonzero(h.arrays([4], [4])["attn_mask"][0, 0, 0] == 0).tolist() == list(range(5))
    assert np.flatnonzero(h.arrays([9], [9])["attn_mask"][0, 0, 0] == 0).tolist() == [*range(5), 9]


# Rotary rows past the tables, where a sliding context goes.


ROPE = {"inv_freq": [1.0, 0.3, 0.01], "scale": 1.5}


def test_restored_rings_and_slots_are_those_of_the_text() -> None:
    """After another text the host makes the masks that it would have made without that text."""
    first, other = (host(slots=96, window=8, taps=3, ring=32) for _ in range(2))
    for start in range(0, 60, 4):
        first.arrays(range(start, start + 4), range(start, start + 4))
    rings = first.rings()
    for start in range(0, 90, 3):
        other.arrays(range(start, start + 3), range(start, start + 3))
    other.reset()
    assert other.is_empty and not other.rewindable(60)
    other.restore(0, 32)
    other.restore(32, 60, rings)
    assert other.rewindable(60) and other.rewindable(58)
    for name, array in first.arrays([60, 61], [60, 61]).items():
        assert np.array_equal(other.arrays([60, 61], [60, 61])[name], array), name
    assert rings["recent"].max() == rings["ring"].max() == 59  # copies: later passes leave them as they are


def test_rotary_rows_go_on_where_the_tables_end() -> None:
    """And far beyond float32's integers, two positions are still one step apart."""
    pairs = zip(rope_tables(ROPE, 64), rope_rows(ROPE, np.arange(64)), strict=True)
    for table, rows in pairs:  # angles of up to 64 in fp32, the table's, and in fp64
        limits.numbers_agree("rotary rows", table, rows, limits.roundings("fp32", 64))
    cos, sin = (rows.astype(np.float64) / 1.5 for rows in rope_rows(ROPE, np.array([10**9, 10**9 + 1])))
    step = np.arctan2(sin[1] * cos[0] - cos[1] * sin[0], cos[0] * cos[1] + sin[0] * sin[1])
    limits.numbers_agree("a step", step, ROPE["inv_freq"], limits.roundings("fp32", 4), size=1)


def test_a_pass_may_lie_past_the_slots() -> None:
    """Every table that a model has goes on, also in a pass across its end."""
    model = {"context": 8, "window": None, "window_slots": 0, "conv_taps": 0}
    host = KVLayout(model | {"rope": {"rope": ROPE, "rope_local": ROPE}})
    found = host.arrays([7, 4], [7, 8])
    for name, rows in zip(("rope_cos", "rope_sin"), rope_rows(ROPE, np.array([7, 8])), strict=True):
        assert np.array_equal(found[name], rows)
        assert np.array_equal(found[f"{name}_local"], rows)


# Texts that share an encoder's pass: none is lost, none sees another, and each begins at position 0.


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 60))
def test_every_text_has_a_pass_with_room_for_it(counts: list[int], longest: int) -> None:
    passes = packed_texts(counts, longest)
    assert sorted(i for one in passes for i in one) == list(range(len(counts)))
    sizes = [sum(counts[i] for i in one) for one in passes]
    assert all(0 < size <= longest for size in sizes)
    assert sum(size * 2 <= longest for size in sizes) <= 1  # two half-empty passes would have been one


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([None, 1, 3]), st.booleans())
def test_a_token_sees_its_own_text_only(counts: list[int], band: int | None, causal: bool) -> None:
    bucket = 24
    mask = encoder_mask(bucket, counts, band, causal=causal)[0, 0]
    texts = [text for text, count in enumerate(counts) for _ in range(count)]
    for t, mine in enumerate(texts):
        near = [s for s in range(len(texts)) if (band is None or abs(s - t) <= band) and (s <= t or not causal)]
        seen = [s for s in near if texts[s] == mine]
        assert np.flatnonzero(mask[t] == 0).tolist() == seen
    assert (mask == 0).any(-1).all()  # a row of nothing would divide by zero


def test_every_text_begins_at_position_0() -> None:
    table = {"inv_freq": [1.0, 0.5], "scale": 1.0}
    found = encoder_arrays({"rope": {"rope": table}, "band": None}, 8, [3, 2])["rope_sin"]
    limits.numbers_agree("sines", found[:5, 0], np.sin([0, 1, 2, 0, 1]), limits.roundings("fp32"))


def test_rows_come_back_to_their_texts() -> None:
    texts = [np.full((n, 2), n, np.float32) for n in (3, 1, 2)]
    x = columns(texts, 8)
    assert x.shape == (1, 2, 8, 1) and not x[:, :, 6:].any()
    assert all(np.array_equal(a, b) for a, b in zip(apart(x[0, :, :, 0].T, [3, 1, 2]), texts, strict=True))


def test_too_many_tokens_have_no_bucket() -> None:
    assert bucket_for([32, 128], 33) == 128
    with pytest.raises(ValueError, match="129 tokens"):
        bucket_for([32, 128], 129)


@pytest.mark.parametrize("model_type", sorted(tiny_encoders.TINY))
def test_texts_that_share_a_pass_are_what_transformers_makes_of_each(model_type: str) -> None:
    model = tiny_encoders.tiny_model(model_type)
    blocks = tiny_encoders.Blocks(tiny_encoders.described(model), dict(model.state_dict()))
    text = tiny_encoders.tiny_text(30)
    texts = [text[:11], text[11:12], text[12:]]
    for found, tokens in zip(blocks.run_together(texts, 48), texts, strict=True):
        limits.rows_agree(f"{len(tokens)} tokens", found, tiny_encoders.expected(model, tokens), limit_of(model))
