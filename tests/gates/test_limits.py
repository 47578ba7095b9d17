"""Limits of question 3 by the bits of the weights: looser with fewer, the same for all else."""

from __future__ import annotations

import pytest

from shardmill.gates.limits import COSTS, FOUR, SIX, bits, table
from shardmill.gates.thresholds import COST, THRESHOLDS, Measurement, compare


def test_int8_and_fp16_are_judged_by_the_table() -> None:
    assert bits(["int8", "fp16", "palette8/16"]) == bits([]) == ""
    assert table("") == THRESHOLDS


def test_the_form_with_the_fewest_bits_decides() -> None:
    assert bits(["int8", "int4", "palette6"]) == bits(["palette4/16"]) == FOUR
    assert bits(["palette6/8", "int8"]) == SIX


@pytest.mark.parametrize("name", [name for name, row in THRESHOLDS.items() if row.question == COST])
def test_fewer_bits_may_cost_more(name: str) -> None:
    """Each number of question 3 has its limits, in the order of the bits."""
    allowed = [table(key)[name].limit for key in (FOUR, SIX, "")]
    assert allowed == sorted(set(allowed), reverse=not THRESHOLDS[name].at_least)


@pytest.mark.parametrize("key", COSTS)
def test_other_questions_have_one_answer_for_all(key: str) -> None:
    """Whatever the weights are, the program has to be the one that was written."""
    changed = {name for name, row in table(key).items() if row != THRESHOLDS[name]}
    assert changed == {name for name, row in THRESHOLDS.items() if row.question == COST}
    assert all(why for _, why in COSTS[key].values())


def test_a_budget_goes_before_them() -> None:
    rows = compare([Measurement("perplexity_ratio", 1.04)], table(FOUR, {"perplexity_ratio": 1.03}))
    assert [(row["threshold"], row["passed"]) for row in rows] == [("<= 1.03", False)]
    assert compare([Measurement("perplexity_ratio", 1.04)], table(FOUR))[0]["passed"]
    with pytest.raises(AssertionError):
        table("", {"program_error": 1.0})


def test_codes_of_a_quantiser_may_be_further_away() -> None:
    """And nothing else may: all of question 1 and 2 but the distance of codes stays as it is."""
    changed = {name for name, row in table("", calibrated=True).items() if row != THRESHOLDS[name]}
    assert changed == {"weight_steps"}
    assert THRESHOLDS["weight_steps"].limit < table(FOUR, calibrated=True)["weight_steps"].limit <= 8
