"""Limits of question 3 by the bits of the weights: looser with fewer, the same for all else."""

from __future__ import annotations

import pytest

from shardmill.gates.limits import COSTS, FEW, FOUR, SIX, bits, budget, of, table
from shardmill.gates.measurement import Measurement, compare
from shardmill.gates.thresholds import COST, THRESHOLDS


def test_int8_and_fp16_are_judged_by_the_table() -> None:
    assert bits({"int8": 5, "fp16": 1, "palette8/16": 1}) == bits({}) == ""
    assert table("") == THRESHOLDS


def test_the_form_with_the_fewest_bits_decides() -> None:
    assert bits({"int8": 9, "int4": 1, "palette6": 3}) == bits({"palette4/16": 1}) == FOUR
    assert bits({"palette6/8": 1, "int8": 9}) == SIX


def test_of_a_whole_model_the_forms_of_few_weights_do_not_decide() -> None:
    """However a recipe is written: an INT4 default that no matrix has, or one small matrix in INT4, is INT8."""
    assert bits({"int4": 0, "int8": 9}) == ""
    assert bits({"int4": 1, "int8": 9}, FEW) == "" and bits({"int4": 2, "int8": 9}, FEW) == FOUR
    assert bits({"int4": 1, "palette6": 1, "int8": 10}, FEW) == SIX
    assert bits({"int4": 1}, FEW) == FOUR


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


def test_a_verdict_says_by_which_limits_it_was_judged() -> None:
    assert of({}) == THRESHOLDS
    assert of({"limits": FOUR}) == table(FOUR)
    found = of({"limits": FOUR, "budget": budget(1.03)})
    assert found["perplexity_ratio"].limit == pytest.approx(1.06)
    assert found["kl"].limit == pytest.approx(0.0591, abs=1e-4)


@pytest.mark.parametrize("growth", [1.01, 1.2, 3.0])
def test_no_budget_is_looser_than_four_bits(growth: float) -> None:
    """Neither one that a build sets, nor one that somebody writes into a verdict."""
    loosest, written = table(FOUR), {"perplexity_ratio": 100.0, "kl": 50.0}
    for found in (table(FOUR, budget(growth)), of({"limits": FOUR, "budget": written})):
        assert all(found[name].limit <= loosest[name].limit for name in written)


@pytest.mark.parametrize("growth", [1.0, 1 + 1e-9, 1.001, 1.004])
def test_no_budget_is_stricter_than_int8(growth: float) -> None:
    """A search that foresees no loss at all still rounds to fp16 on the way."""
    assert budget(growth) == {name: THRESHOLDS[name].limit for name in ("perplexity_ratio", "kl")}
