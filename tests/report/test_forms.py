"""What the page says of a search for forms: the choice, the front, and where the loss lies."""

from __future__ import annotations

from typing import Any

import pytest

from report import sample
from report.reading import section, words
from shardmill.report.forms import costliest, steps
from shardmill.report.page import render


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
    found, shown = search()["front"], steps(search())
    assert shown[0] == found[0] and shown[-1] == found[-1] and 5 <= len(shown) <= 9
    assert steps(search(front=found[:1])) == found[:1]


def test_the_page_says_what_was_chosen_and_where_the_loss_lies() -> None:
    text = words(section(render(sample.build(search=search())), "forms"))
    assert "keep perplexity to 1.03" in text and "5.33 bits per weight" in text and "3.67 %" in text
    assert "83.3 %" in text and "What bits buy" in text


def test_a_build_without_a_search_has_no_such_section() -> None:
    assert 'id="forms"' not in render(sample.build())
