"""What precision may cost, by the bits of the weights: the limits of question 3 in the table of thresholds are INT8's.

Weights of fewer bits cost more whatever is done, and a gate that INT4 can't pass says nothing of a build. A build that
names a budget is held to that instead: whoever sets it has said what the model may cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardmill.forms.form import form
from shardmill.gates.thresholds import COST, THRESHOLDS, Threshold

FOUR, SIX = "4 bits", "6 bits"
APPLE = "Apple's own models of 4 to 6 bits lose 14.6 to 18.1 % in perplexity on WikiText-2 (coreai-models 86b363d)"
FEW = 0.1  # of a model's weights: that many of fewer bits are judged by the limits of the others
MOST = 4  # times the noise of an average matrix is what one matrix of a part may bring
SAME = "follows from the limit on perplexity: a loss of 20 % is 0.18 nat a token"
LOUDER = "a bit less is 6 dB more noise: the limit of INT8, less {} dB"
# Limits by the fewest bits of a weight, each with its reason. Where a number is not named, INT8's limit holds.
COSTS: Mapping[str, Mapping[str, tuple[float, str]]] = {
    FOUR: {
        "psnr": (6.0, LOUDER.format(24)),
        "experts_agreement_fp16": (0.6, "scores move by sixteen times as much as with INT8"),
        "kl": (0.2, SAME),
        "top1_agreement": (0.8, SAME),
        "perplexity_ratio": (1.2, APPLE),
        "label_kl": (0.2, "the limit of next-token distributions"),
        "label_agreement": (0.9, "labels are few, and their margins wide"),
        "span_agreement": (
            0.8,
            "a span has several tokens, each of which may differ as the agreement of labels allows",
        ),
        "embedding_cosine": (0.9, "noise of a fifth of the signal's power leaves 0.9"),
    },
    SIX: {
        "psnr": (18.0, LOUDER.format(12)),
        "experts_agreement_fp16": (0.8, "scores move by four times as much as with INT8"),
        "kl": (0.06, "between INT8's and that of 4 bits"),
        "top1_agreement": (0.95, "between INT8's and that of 4 bits"),
        "perplexity_ratio": (1.05, "between INT8's and that of 4 bits"),
        "label_kl": (0.06, "the limit of next-token distributions"),
        "label_agreement": (0.97, "between INT8's and that of 4 bits"),
        "span_agreement": (0.94, "between INT8's and that of 4 bits"),
        "embedding_cosine": (0.97, "between INT8's and that of 4 bits"),
    },
}


def bits(numbers: Mapping[str, int], share: float = 0.0) -> str:
    """By which limits weights are judged: a key of COSTS, or nothing for those of the table.

    Args:
        numbers: how many weights have each form.
        share: of the weights; where those of the fewest bits are no more than that, the next ones decide.
    """
    least, counted = share * sum(numbers.values()), 0
    for count, found in sorted((form(name).bits, number) for name, number in numbers.items()):
        counted += found
        if counted > least:
            return f"{count} bits" if count < 8 else ""
    return ""


def shares(forms: Mapping[str, str]) -> dict[str, float]:
    """Return which share of a part's noise its matrices of 4 and of 6 bits may bring, by the keys of COSTS.

    The noise of a part is the sum over its matrices, so one matrix of 4 bits among many of 8 loosens the part's limits
    by little. Matrices are counted, not weights: the whole signal passes through a small matrix too.

    Args:
        forms: the form of each of its matrices.
    """
    found = {key: sum(form(name).bits == count for name in forms.values()) for count, key in ((4, FOUR), (6, SIX))}
    left: float = 1.0
    shared: dict[str, float] = {}
    for key, number in found.items():
        share = min(left, MOST * number / len(forms)) if number else 0.0
        left -= share
        shared |= {key: share} if share else {}
    return shared


def budget(growth: float) -> dict[str, float]:
    """Limits of a build whose perplexity was allowed to grow by a factor, as the calibration text foresees it.

    A parity text is another one, and short: some hundred tokens know the growth to within as much again. No budget is
    looser than what INT4 throughout may cost, nor stricter than what INT8 may: fp16 arithmetic costs something, too.
    """
    wide = {"perplexity_ratio": 1 + 2 * (growth - 1), "kl": 2 * math.log(growth)}
    return {name: min(max(limit, THRESHOLDS[name].limit), COSTS[FOUR][name][0]) for name, limit in wide.items()}


def of(judged: Mapping[str, Any]) -> dict[str, Threshold]:
    """Return the thresholds by which a verdict says that it was judged.

    No budget or share in a verdict gives looser thresholds than those of 4 bits.
    """
    named = {name: min(limit, COSTS[FOUR][name][0]) for name, limit in judged.get("budget", {}).items()}
    return table(judged.get("limits", ""), named, judged.get("shares"))


def table(
    key: str, budget: Mapping[str, float] | None = None, shares: Mapping[str, float] | None = None
) -> dict[str, Threshold]:
    """Return the thresholds of a build, or of a part.

    Args:
        key: what `bits` gives.
        budget: limits that somebody set, by the names of numbers of question 3; they go before all others.
        shares: the result of `shares`, for a part: its limits lie between INT8's and the limits of fewer bits.

    Raises:
        KeyError: for a key or a name that there is not.
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
    given = {key: max(0.0, share) for key, share in shares.items()}
    whole = max(1.0, sum(given.values()))
    parts = [(share / whole, COSTS[key][name][0]) for key, share in given.items()]
    parts.append((1 - sum(share for share, _ in parts), THRESHOLDS[name].limit))
    if name == "psnr":
        return -10 * math.log10(sum(share * 10 ** (-limit / 10) for share, limit in parts))
    return sum(share * limit for share, limit in parts)
