"""Fewer bits may cost more, and nothing that a verdict or a search says is looser than the limits of 4 bits."""

from __future__ import annotations

import math

import limits
import pytest

from shardmill.gates.by_bits import COSTS, FEW, bits, budget, limits_table, shares, thresholds_of
from shardmill.gates.measurement import Measurement, compare
from shardmill.gates.thresholds import COST, FOUR, SIX, THRESHOLDS


def test_int8_and_fp16_are_judged_by_the_table() -> None:
    assert bits({"int8": 5, "fp16": 1, "palette8/16": 1}) == bits({}) == ""
    assert limits_table("") == THRESHOLDS


def test_the_form_with_the_fewest_bits_decides() -> None:
    assert bits({"int8": 9, "int4": 1, "palette6": 3}) == bits({"palette4/16": 1}) == FOUR
    assert bits({"palette6/8": 1, "int8": 9}) == SIX


def test_of_a_whole_model_the_forms_of_few_weights_do_not_decide() -> None:
    """However a recipe is written: an INT4 default that no matrix has, or one small matrix in INT4, is INT8."""
    assert bits({"int4": 0, "int8": 9}) == ""
    assert bits({"int4": 1, "int8": 9}, FEW) == "" and bits({"int4": 2, "int8": 9}, FEW) == FOUR
    assert bits({"int4": 1, "palette6": 1, "int8": 10}, FEW) == SIX
    assert bits({"int4": 1}, FEW) == FOUR


def test_one_matrix_of_four_bits_hardly_loosens_a_large_part() -> None:
    """The part is not judged by 6 dB, the limit of a part of four bits throughout."""
    forms = {f"layers.{i}.down_proj": "int8" for i in range(139)} | {"layers.0.k_proj": "int4"}
    found = limits_table(FOUR, shares=shares(forms))["psnr"].limit
    assert found == pytest.approx(-10 * math.log10(1e-3 * 136 / 140 + 10**-0.6 * 4 / 140)) and 20 < found < 22
    assert thresholds_of({"limits": FOUR, "shares": shares(forms)})["psnr"].limit == found


def test_limits_of_a_part_lie_between_those_of_the_table_and_those_of_fewer_bits() -> None:
    for number in range(9):
        forms = {str(i): "int4" if i < number else "int8" for i in range(8)}
        few, many = limits_table(""), limits_table(FOUR)
        for name in COSTS[FOUR]:
            found = limits_table(FOUR if number else "", shares=shares(forms))[name].limit
            low, high = sorted((few[name].limit, many[name].limit))
            assert low <= found <= high or found == pytest.approx(low) or found == pytest.approx(high)
    assert shares({"a": "int4", "b": "palette4/16"}) == {FOUR: 1.0}
    assert shares({"a": "int8", "b": "fp16"}) == shares({}) == {}
    assert shares({**dict.fromkeys("abcdefghij", "int8"), "k": "int4", "l": "palette6/8"}) == {FOUR: 1 / 3, SIX: 1 / 3}
    assert shares({"a": "int4", "b": "palette6/8", "c": "int8"}) == {FOUR: 1.0}


def test_no_share_that_somebody_writes_is_looser_than_four_bits() -> None:
    for written in ({FOUR: 100.0}, {FOUR: 1.0, SIX: 50.0}, {FOUR: -3.0}):
        found, loosest = thresholds_of({"limits": FOUR, "shares": written}), limits_table(FOUR)
        for name in COSTS[FOUR]:
            worse = found[name].limit - loosest[name].limit
            rounded = limits.roundings("fp64", 4).value * abs(loosest[name].limit)
            assert worse >= -rounded if THRESHOLDS[name].at_least else worse <= rounded


# A tower's matrices are fp16 or INT8.
BY_BITS = {name for name, row in THRESHOLDS.items() if row.question == COST and not name.startswith("tower_")}


@pytest.mark.parametrize("name", sorted(BY_BITS))
def test_fewer_bits_may_cost_more(name: str) -> None:
    """Each number of question 3 has its limits, in the order of the bits."""
    allowed = [limits_table(key)[name].limit for key in (FOUR, SIX, "")]
    assert allowed == sorted(set(allowed), reverse=not THRESHOLDS[name].at_least)


@pytest.mark.parametrize("key", COSTS)
def test_other_questions_have_one_answer_for_all(key: str) -> None:
    """Whatever the weights are, the program has to be the one that was written."""
    changed = {name for name, row in limits_table(key).items() if row != THRESHOLDS[name]}
    assert changed == BY_BITS
    assert all(why for _, why in COSTS[key].values())


def test_a_budget_goes_before_them() -> None:
    rows = compare([Measurement("perplexity_ratio", 1.04)], limits_table(FOUR, {"perplexity_ratio": 1.03}))
    assert [(row["threshold"], row["passed"]) for row in rows] == [("<= 1.03", False)]
    assert compare([Measurement("perplexity_ratio", 1.04)], limits_table(FOUR))[0]["passed"]
    with pytest.raises(AssertionError):
        limits_table("", {"program_error": 1.0})


def test_a_verdict_says_by_which_limits_it_was_judged() -> None:
    assert thresholds_of({}) == THRESHOLDS
    assert thresholds_of({"limits": FOUR}) == limits_table(FOUR)
    found = thresholds_of({"limits": FOUR, "budget": budget(1.03)})
    assert found["perplexity_ratio"].limit == pytest.approx(1.06)
    assert found["kl"].limit == pytest.approx(2 * math.log(1.03))


@pytest.mark.parametrize("growth", [1.01, 1.2, 3.0])
def test_no_budget_is_looser_than_four_bits(growth: float) -> None:
    """Neither one that a build sets, nor one that somebody writes into a verdict."""
    loosest, written = limits_table(FOUR), {"perplexity_ratio": 100.0, "kl": 50.0}
    for found in (limits_table(FOUR, budget(growth)), thresholds_of({"limits": FOUR, "budget": written})):
        assert all(found[name].limit <= loosest[name].limit for name in written)


def test_a_budget_of_another_number_is_none() -> None:
    """A limit from below would be loosened by taking the smaller of two."""
    with pytest.raises(KeyError, match="no budget of psnr"):
        thresholds_of({"budget": {"psnr": -1e9}})


@pytest.mark.parametrize("growth", [1.0, 1 + 1e-9, 1.001, 1.004])
def test_no_budget_is_stricter_than_int8(growth: float) -> None:
    """A search that foresees no loss at all still rounds to fp16 on the way."""
    assert budget(growth) == {name: THRESHOLDS[name].limit for name in ("perplexity_ratio", "kl")}
