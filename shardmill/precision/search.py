"""The cheapest set of forms under a budget, as an integer program; scipy's HiGHS solves it exactly.

What a set costs in quality is estimated as the sum of what each matrix costs by itself. For small errors the loss grows
linearly in the squared errors of single matrices ("Pushing the Limits of Large Language Model Quantization via the
Linearity Theorem", https://arxiv.org/abs/2411.17525); how well the sum foretells what is measured is measured too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Table = Mapping[str, Mapping[str, float]]  # by matrix and form
GAP = 1e-4  # of the optimum: a share that nobody would notice, and the last digits take the solver longest
EXACT = 1e-12  # of a limit: what sums of some hundred numbers may be off


@dataclass(frozen=True)
class Choice:
    """A form for each matrix, with what they sum up to."""

    forms: Mapping[str, str]
    loss: float
    size: float


def smallest(losses: Table, sizes: Table, most: float) -> Choice | None:
    """The least size with a loss of at most `most`; None if there is none.

    Args:
        losses: what a matrix costs in a form.
        sizes: its bytes.
        most: in the unit of losses.
    """
    return _solved(losses, sizes, sizes, losses, most)


def best(losses: Table, sizes: Table, most: float) -> Choice | None:
    """The least loss with a size of at most `most`; None if there is none."""
    return _solved(losses, sizes, losses, sizes, most)


def front(losses: Table, sizes: Table, points: int) -> list[Choice]:
    """Choices that no other is better than, by size from the least to that of the least loss, evenly spaced."""
    least = sum(min(forms.values()) for forms in sizes.values())
    most = sum(min((losses[name][form], size) for form, size in forms.items())[1] for name, forms in sizes.items())
    found: list[Choice] = []
    for limit in np.linspace(least, most, points):
        choice = best(losses, sizes, float(limit) + 0.5)  # half a byte, so that rounding excludes nothing
        if choice and (not found or choice.loss < found[-1].loss):
            found.append(choice)
    return found


def _solved(losses: Table, sizes: Table, least: Table, limited: Table, limit: float) -> Choice | None:
    """The forms with the least sum of `least` whose sum of `limited` is within the limit.

    The solver takes a set for one that keeps to a limit where it is a millionth over it. Then it is asked again for a
    little less.
    """
    asked, step = limit, 1.0
    while (forms := _forms(losses, least, limited, asked)) is not None:
        over = summed(limited, forms) - limit
        if over <= EXACT * max(1.0, abs(limit)):
            return Choice(forms, summed(losses, forms), summed(sizes, forms))
        asked, step = limit - step * over, 2 * step
    return None


def _forms(losses: Table, least: Table, limited: Table, limit: float) -> dict[str, str] | None:
    """The same, to the solver's tolerance."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    pairs = [(name, form) for name in losses for form in losses[name]]
    places = {name: place for place, name in enumerate(losses)}
    rows = [places[name] for name, _ in pairs]
    one_each = csr_array((np.ones(len(pairs)), (rows, range(len(pairs)))), shape=(len(places), len(pairs)))
    result = milp(
        _column(least, pairs),
        integrality=np.ones(len(pairs)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(_column(limited, pairs)[None], -np.inf, limit)],
        options={"mip_rel_gap": GAP},
    )
    if result.x is None:
        return None
    return {name: form for (name, form), taken in zip(pairs, result.x, strict=True) if taken > 0.5}


def _column(table: Table, pairs: Sequence[tuple[str, str]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([table[name][form] for name, form in pairs])


def summed(table: Table, forms: Mapping[str, str]) -> float:
    """What a set of forms adds up to."""
    return float(sum(table[name][form] for name, form in forms.items()))
