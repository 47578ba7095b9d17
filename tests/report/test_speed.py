"""The benchmark's file: rows grouped without loss, and drawings that are the same bytes everywhere."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from matplotlib import rc_context

from report import sample
from shardmill.report.speed import Plot, by_position, drafters, plots, speed_groups
from shardmill.report.wording import COLOURS, alone

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


@pytest.fixture(scope="module")
def drawn() -> list[Plot]:
    return plots(sample.speed())


def words(plot: Plot) -> list[str]:
    """The texts of a drawing."""
    return re.findall(r">([^<>]+)</text>", plot.svg)


def test_a_users_own_settings_change_nothing(drawn: list[Plot]) -> None:
    """A matplotlibrc in somebody's home must not change the page."""
    with rc_context({"font.size": 30, "lines.linestyle": ":", "svg.hashsalt": None}):
        assert plots(sample.speed()) == drawn


def test_every_colour_is_the_pages(drawn: list[Plot]) -> None:
    """A colour of its own would vanish in the dark, or on paper."""
    for plot in drawn:
        assert not set(re.findall(r"#[0-9a-f]{6}\b", plot.svg))
        assert not set(COLOURS) & set(re.findall(r"#\d{6}", plot.svg))


def test_every_question_has_its_drawing(drawn: list[Plot]) -> None:
    """Speed-up by length, the cost of a pass, acceptance by position live and replayed apart, and each task."""
    assert [plot.title for plot in drawn] == [
        "Speed-up over prompt length, tiled code",
        "Time of a pass by its width",
        "Drafts accepted by position, live",
        "Drafts accepted by position, replayed",
        "Tokens per pass by task",
        "Speed-up by task",
    ]
    assert [plot.wide for plot in drawn] == [False] * 4 + [True] * 2


def test_drafters_are_named_and_the_control_is_not_drawn(drawn: list[Plot]) -> None:
    """T = 1 against itself is the line at 1, not a drafter."""
    for plot in (drawn[0], *drawn[2:]):
        assert {"ngram", "learned"} <= set(words(plot))
        assert "none" not in words(plot)


def test_the_best_speed_up_of_each_length_is_written(drawn: list[Plot]) -> None:
    assert {"1.56 ×", "1.62 ×", "100", "372"} <= set(words(drawn[0]))
    assert not {"1.46 ×", "1.59 ×"} & set(words(drawn[0]))


def test_the_break_even_is_written_beside_the_passes(drawn: list[Plot]) -> None:
    assert {"T = 1: 12.5 ms", "T = 4: 15.5 ms", "pays above 1.24 tokens per pass"} <= set(words(drawn[1]))


def test_each_task_has_a_bar_per_drafter_with_its_value(drawn: list[Plot]) -> None:
    assert {"code edit", "free text", "1.47", "1.48", "1.09"} <= set(words(drawn[4]))
    assert {"1.17", "1.18", "0.98"} <= set(words(drawn[5]))


def test_replayed_figures_are_drawn_from_the_replay() -> None:
    """They must not be the live ones once more; a drafter that was not replayed is left out."""
    file = sample.speed()
    for row in file["tasks"]:
        row["oracle"] = None
    live, changed = plots(sample.speed()), plots(file)
    assert live[2] == changed[2]
    assert live[3] != changed[3] and live[4] != changed[4]


def test_one_width_has_no_break_even() -> None:
    """A model with T = 1 only: there is nothing to compare, and no acceptance to draw."""
    file = sample.speed() | {"pass_seconds": {"1": 0.0125}, "tasks": [], "sweep": sample.speed()["sweep"][:1]}
    assert plots(file) == []


def test_nothing_measured_no_plots() -> None:
    assert plots(sample.speed() | {"sweep": [], "tasks": [], "pass_seconds": {}}) == []


def test_a_figure_stands_alone_as_a_file(drawn: list[Plot]) -> None:
    """Well-formed, and every colour and font that it names is defined in it."""
    for plot in drawn:
        text = alone(plot.svg)
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert set(re.findall(r"var\((--\w+)\)", text)) <= set(re.findall(r"(--[\w-]+):", text))
    assert len({plot.name for plot in drawn}) == len(drawn)
