"""Drawings that are the same bytes everywhere, and take their colours from the page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from matplotlib import rc_context

from shardmill.report.plots import COLOURS, Plot, plots
from tests.report import sample

ROWS: list[dict[str, Any]] = sample.speed()["rows"]


@pytest.fixture(scope="module")
def drawn() -> list[Plot]:
    return plots(ROWS)


def test_a_users_own_settings_change_nothing(drawn: list[Plot]) -> None:
    """A matplotlibrc in somebody's home must not change the page."""
    with rc_context({"font.size": 30, "lines.linestyle": ":", "svg.hashsalt": None}):
        assert plots(ROWS) == drawn


def test_every_colour_is_the_pages(drawn: list[Plot]) -> None:
    """A colour of its own would vanish in the dark, or on paper."""
    for plot in drawn:
        assert not set(re.findall(r"#[0-9a-f]{6}\b", plot.svg))
        assert not set(COLOURS) & set(re.findall(r"#\d{6}", plot.svg))


def test_values_are_written_at_the_points(drawn: list[Plot]) -> None:
    speedup, throughput, passes = drawn
    assert "1.46 ×" in speedup.svg and "1.62 ×" in speedup.svg
    assert all(name in throughput.svg for name in ("prefill, T = max", "decode, n-grams", "decode, T = 1"))
    assert "1.83" in passes.svg
    assert all(">372<" in plot.svg for plot in drawn)


def test_a_value_that_is_missing_is_left_out() -> None:
    """Not drawn at 0."""
    rows = [ROWS[0], {**ROWS[1], "speedup": None}]
    assert "1.46 ×" in plots(rows)[0].svg and "0.00 ×" not in plots(rows)[0].svg


def test_no_rows_no_plots() -> None:
    assert plots([]) == []
