"""Rotary rows past the tables, where a sliding context goes."""

from __future__ import annotations

import numpy as np

from shardmill.models.host import KVLayout, rope_rows, rope_tables

ROPE = {"inv_freq": [1.0, 0.3, 0.01], "scale": 1.5}


def test_rotary_rows_go_on_where_the_tables_end() -> None:
    """And far beyond float32's integers, two positions are still one step apart."""
    pairs = zip(rope_tables(ROPE, 64), rope_rows(ROPE, np.arange(64)), strict=True)
    assert max(np.abs(table - rows).max() for table, rows in pairs) < 1e-5
    cos, sin = (rows.astype(np.float64) / 1.5 for rows in rope_rows(ROPE, np.array([10**9, 10**9 + 1])))
    step = np.arctan2(sin[1] * cos[0] - cos[1] * sin[0], cos[0] * cos[1] + sin[0] * sin[1])
    assert np.abs(step - ROPE["inv_freq"]).max() < 1e-5


def test_a_pass_may_lie_past_the_slots() -> None:
    """Every table that a model has goes on, also in a pass across its end."""
    model = {"context": 8, "window": None, "window_slots": 0, "conv_taps": 0}
    host = KVLayout(model | {"rope": {"rope": ROPE, "rope_local": ROPE}})
    found = host.arrays([7, 4], [7, 8])
    for name, rows in zip(("rope_cos", "rope_sin"), rope_rows(ROPE, np.array([7, 8])), strict=True):
        assert np.array_equal(found[name], rows)
        assert np.array_equal(found[f"{name}_local"], rows)
