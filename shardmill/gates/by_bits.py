"""Which limits judge a build: INT8's limits, the limits of fewer bits, a mixture of these, or a search's budget.

A verdict records what names its limits: `limits` and `shares` for a part, `limits` and `budget` for the stack.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardmill.forms.form import form
from shardmill.gates.thresholds import COST, FEWER, FOUR, THRESHOLDS, Threshold

if TYPE_CHECKING:
    from shardmill.forms.recipe import Recipe
    from shardmill.plan import Part

FEW = 0.1  # if at most this share of a model's weights has fewer bits, those weights do not loosen the limits
MOST = 4  # one matrix of a part may have this many times the noise of an average matrix
BUDGETED = ("perplexity_ratio", "kl")  # the measurements that a budget limits: see `budget`
# Limits by the fewest bits of a weight, each with its reason. A measurement without an entry keeps INT8's limit.
COSTS: Mapping[str, Mapping[str, tuple[float, str]]] = {
    key: {name: row.fewer[key] for name, row in THRESHOLDS.items() if key in row.fewer} for key in FEWER.values()
}


def bits(numbers: Mapping[str, int], share: float = 0.0) -> str:
    """Return which limits apply to weights: a key of COSTS, or '' for the limits of the table.

    Args:
        numbers: the number of weights in each form.
        share: share of the weights. If the weights of the fewest bits are at most this share, the next ones decide.
    """
    least, counted = share * sum(numbers.values()), 0
    for count, weights in sorted((form(name).bits, number) for name, number in numbers.items()):
        counted += weights
        if counted > least:
            return FEWER.get(count, "")
    return ""


def shares(forms: Mapping[str, str]) -> dict[str, float]:
    """Return the share of a part's noise that its matrices of 4 and of 6 bits may contribute, by the keys of COSTS.

    The noise of a part is the sum over its matrices, so one matrix of 4 bits among many of 8 loosens the part's limits
    only a little. Matrices are counted, not weights: the whole signal passes through a small matrix too.

    Args:
        forms: the form of each matrix of the part.
    """
    numbers = {key: sum(form(name).bits == count for name in forms.values()) for count, key in FEWER.items()}
    left: float = 1.0
    shared: dict[str, float] = {}
    for key, number in numbers.items():
        share = min(left, MOST * number / len(forms)) if number else 0.0
        left -= share
        shared |= {key: share} if share else {}
    return shared


def budget(growth: float) -> dict[str, float]:
    """Return the limits of a build whose perplexity on the calibration text was allowed to grow by a factor.

    The parity text is different and short, some hundred tokens, so its estimate may be off by as much as the growth
    itself. No budget is looser than the limits of INT4 throughout, nor stricter than INT8's: fp16 arithmetic costs
    something, too.
    """
    wide = {"perplexity_ratio": 1 + 2 * (growth - 1), "kl": 2 * math.log(growth)}
    return {name: min(max(wide[name], THRESHOLDS[name].limit), COSTS[FOUR][name][0]) for name in BUDGETED}


def part_limits(part: Part, recipe: Recipe) -> dict[str, Any]:
    """Return what names the thresholds of a part in its verdict: `limits` and `shares`; empty for the table's.

    Args:
        part: the part.
        recipe: the form of each matrix, as precision.json has it.
    """
    key, shared = bits(recipe.numbers(part.named_shapes)), shares(part.forms(recipe))
    return ({"limits": key} if key else {}) | ({"shares": shared} if key and shared != {key: 1.0} else {})


def stack_limits(parts: Iterable[Part], recipe: Recipe, search: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what names the thresholds of the stack: `limits`, by the forms of most weights, or a search's `budget`.

    Args:
        parts: the parts of a pass.
        recipe: the form of each matrix, as precision.json has it.
        search: search.json's content, if there was a search: its estimate sets the budget.
    """
    numbers = Counter[str]()
    for part in parts:
        numbers.update(recipe.numbers(part.named_shapes))
    key = bits(numbers, share=0 if search else FEW)
    limits: dict[str, Any] = {"limits": key} if key else {}
    return limits | ({"budget": budget(search["estimate"]["perplexity"])} if search else {})


def thresholds_of(judged: Mapping[str, Any]) -> dict[str, Threshold]:
    """Return the thresholds that a verdict records as its own.

    No budget or share in a verdict gives looser thresholds than the limits of 4 bits. Raises KeyError for a budget of
    anything but what `budget` limits.
    """
    budgets = judged.get("budget", {})
    if budgets.keys() - {*BUDGETED}:
        raise KeyError(f"no budget of {', '.join(sorted(budgets.keys() - {*BUDGETED}))}")
    named = {name: min(limit, COSTS[FOUR][name][0]) for name, limit in budgets.items()}
    return limits_table(judged.get("limits", ""), named, judged.get("shares"))


def limits_table(
    key: str, budget: Mapping[str, float] | None = None, shares: Mapping[str, float] | None = None
) -> dict[str, Threshold]:
    """Return the thresholds of a build or a part.

    Args:
        key: the result of `bits`.
        budget: limits set by the user, by the names of measurements of question 3; they override all others.
        shares: the result of `shares`, for a part: its limits lie between INT8's and the limits of fewer bits.

    Raises:
        KeyError: for an unknown key or name.
    """
    limits = dict(COSTS[key]) if key else {}
    if shares:
        why = ", ".join(f"{share:.0%} of the noise at {key}" for key, share in shares.items())
        mixed = f"between INT8's limit and the limit of fewer bits: {why}"
        limits = {name: (_between(name, shares), mixed) for name in COSTS[FOUR]}
    limits |= {name: (limit, "the build's own budget") for name, limit in (budget or {}).items()}
    assert all(THRESHOLDS[name].question == COST for name in limits)
    changed = {name: replace(THRESHOLDS[name], limit=limit, why=why) for name, (limit, why) in limits.items()}
    return THRESHOLDS | changed


def _between(name: str, shares: Mapping[str, float]) -> float:
    """Return the limit for mixed noise: by the noise's power if the limit is in dB, otherwise by the limit itself."""
    clipped = {key: max(0.0, share) for key, share in shares.items()}
    whole = max(1.0, sum(clipped.values()))
    parts = [(share / whole, COSTS[key][name][0]) for key, share in clipped.items()]
    parts.append((1 - sum(share for share, _ in parts), THRESHOLDS[name].limit))
    if name == "psnr":
        return -10 * math.log10(sum(share * 10 ** (-limit / 10) for share, limit in parts))
    return sum(share * limit for share, limit in parts)
