"""The host's side of a pass by itself: rotary rows, masks, and which position is in each slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from models.hosts import host
from shardmill.models.host import MASKED, NEVER, KVLayout, attention_mask, rope_tables, write_mask


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


def test_the_sliding_mask_counts_positions_not_slots() -> None:
    h = host(slots=6, window=2)
    h.arrays([5, 4, 3], [0, 1, 2])
    found = h.arrays([0], [3])
    assert (found["attn_mask"][0, 0, 0] == 0).tolist() == [True, False, False, True, True, True]
    assert (found["attn_mask_sliding"][0, 0, 0] == 0).tolist() == [True, False, False, True, False, False]
    assert "attn_mask_sliding" not in host(slots=6).arrays([0], [0])
