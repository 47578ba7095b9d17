"""Rows of the benchmark's file: grouped without loss, and shares that are sums, not means of means."""

from __future__ import annotations

import pytest

from report import sample
from shardmill.report.speed import by_position, drafters, speed_groups

ROWS = sample.speed()["tasks"]


def test_rows_stand_under_what_they_are_of() -> None:
    found = speed_groups(ROWS)
    assert [(group.name, group.prompts, len(group.rows)) for group in found] == [
        ("code edit", 2, 2),
        ("free text", 2, 1),
    ]
    assert [row for group in found for row in group.rows] == ROWS


def test_the_control_is_no_drafter() -> None:
    assert drafters(sample.speed()["sweep"]) == ("ngram", "learned")


def test_shares_by_position_are_of_all_drafts_together() -> None:
    """A task with few drafts must not weigh as much as one with many; later positions may be missing in some."""
    rows = [
        sample.drafter("ngram", 1, 1, task="one") | {"live": sample.accepted(1, [90, 100], [5, 10])},
        sample.drafter("ngram", 1, 1, task="two") | {"live": sample.accepted(1, [0, 2])},
        sample.drafter("learned", 1, 1, task="two"),
    ]
    assert by_position(rows, "ngram", "live") == pytest.approx([90 / 102, 0.5])
    assert by_position(rows, "ngram", "oracle") == pytest.approx([0.5, 22 / 40])
    assert by_position(rows, "suffix", "live") == []
