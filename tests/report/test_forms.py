"""What the page says of a search for forms: the choice, the front, and where the loss lies."""

from __future__ import annotations

from typing import Any

import pytest

from report import sample
from report.reading import section, words
from shardmill.forms.recipe import costliest
from shardmill.report.page import render
from shardmill.report.points import front_steps, judged, measured_points


def search(**changes: Any) -> dict[str, Any]:
    """A search over three matrices."""
    costs = {"a": {"int4": 0.03, "int8": 0.001}, "b": {"int4": 0.002, "int8": 0.0}, "c": {"int4": 0.5, "int8": 0.004}}
    sizes = {path: {"int4": 500_000.0, "int8": 1_000_000.0} for path in costs}
    front = [
        {"kl": 0.5 - 0.04 * i, "perplexity": 1.6 - 0.05 * i, "bytes": 1_500_000 + i, "bits_per_weight": 4 + 0.4 * i}
        for i in range(11)
    ]
    return {
        "budget": {"perplexity": 1.03},
        "forms": {"a": "int4", "b": "int4", "c": "int8"},
        "estimate": {"kl": 0.036, "perplexity": 1.0367, "bytes": 2_000_000, "bits_per_weight": 5.33},
        "front": front,
        "costs": costs,
        "sizes": sizes,
    } | changes


def test_the_matrices_that_cost_most_come_first_with_what_more_bits_would_save() -> None:
    first, second, third = costliest(search())
    assert (first.path, second.path, third.path) == ("a", "c", "b")
    assert first.share == pytest.approx(0.03 / 0.036)
    assert (first.saves, first.takes) == (pytest.approx(0.029), 500_000)
    assert (second.form, second.saves, second.takes) == ("int8", 0, 0)


def test_the_rows_of_the_front_begin_and_end_with_its_own() -> None:
    found, shown = search()["front"], front_steps(search())
    assert shown[0] == found[0] and shown[-1] == found[-1] and 5 <= len(shown) <= 9
    assert front_steps(search(front=found[:1])) == found[:1]


def test_the_page_says_what_was_chosen_and_where_the_loss_lies() -> None:
    text = words(section(render(sample.build(search=search())), "forms"))
    assert "keep perplexity to 1.03" in text and "5.33 bits per weight" in text and "3.67 %" in text
    assert "83.3 %" in text and "What bits buy" in text


def test_a_build_without_a_search_has_no_such_section() -> None:
    assert 'id="forms"' not in render(sample.build())


def test_what_more_bits_would_save_is_told_of_the_next_form_that_loses_less() -> None:
    costs = {"a": {"int4": 0.03, "palette6": 0.04, "int8": 0.001, "fp16": 0.0}}
    sizes = {"a": {"int4": 4.0, "palette6": 6.0, "int8": 8.0, "fp16": 16.0}}
    (found,) = costliest(search(forms={"a": "int4"}, costs=costs, sizes=sizes))
    assert (found.saves, found.takes) == (pytest.approx(0.029), 4)


def point(name: str, foreseen: float, measured: float, size: int) -> dict[str, Any]:
    """What was foreseen and measured of a set of forms, by divergences."""
    return {
        "foreseen": {"kl": foreseen, "perplexity": 1 + foreseen, "bytes": size, "bits_per_weight": size / 100},
        "measured": {
            "kl": measured,
            "perplexity": 1 + measured,
            "error": 0.004,
            "original": 9.0,
            "top1": 0.9,
            "tokens": 2048,
        },
    }


GOOD = {
    "front_1": point("front_1", 0.4, 0.5, 400),
    "int4": point("int4", 0.3, 0.35, 500),
    "chosen": point("chosen", 0.03, 0.025, 600),
    "front_2": point("front_2", 0.01, 0.02, 700),
    "int8": point("int8", 0.001, 0.002, 800),
}


def test_estimates_that_rank_as_what_was_measured_are_believed() -> None:
    found = judged(measured_points(GOOD))
    assert len(found) == 2 and "rank correlation of 1.000" in found[0] and "is monotone" in found[1]


def test_estimates_that_rank_otherwise_and_a_front_that_is_not_monotone_are_said_so() -> None:
    """The choice diverges more than a smaller set; of uniform forms that is no fault of the front's."""
    bad = GOOD | {"chosen": point("chosen", 0.03, 0.6, 600), "int8": point("int8", 0.001, 0.4, 800)}
    text = " ".join(judged(measured_points(bad)))
    assert "under 0.9" in text
    assert "not monotone: the choice reads more than front, point 1 and diverges more (0.6000 and 0.5000 nat)" in text
    assert "INT8" not in text


def test_points_that_are_one_count_once() -> None:
    twice = {"chosen": GOOD["chosen"], "front_1": GOOD["chosen"], "int8": GOOD["int8"]}
    assert judged(measured_points(twice))[0].startswith("Too few different points")


def test_the_page_shows_what_was_measured_beside_what_was_foreseen() -> None:
    page = render(sample.build(search=search(), points=GOOD))
    text = words(section(page, "forms"))
    assert "2048 tokens that neither" in text and "front, point 2" in text and "+2.50 ± 0.40 %" in text
    assert "foreseen and measured" in text
    assert "What was measured" not in words(section(render(sample.build(search=search())), "forms"))
