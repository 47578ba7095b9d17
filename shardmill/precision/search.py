"""The cheapest set of forms under a budget, as an integer program; scipy's HiGHS solves it exactly.

What a set costs in quality is estimated as the sum of what each matrix costs by itself. For small errors the loss grows
linearly in the squared errors of single matrices ("Pushing the Limits of Large Language Model Quantization via the
Linearity Theorem", https://arxiv.org/abs/2411.17525); how well the sum foretells what is measured is measured too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from shardmill.errors import ConfigError
from shardmill.forms.form import FP16, INT4, INT8, MATRIX, matrices, misfit, stored_bytes
from shardmill.forms.recipe import RULES, amount, at_least
from shardmill.plan import Part

Table = Mapping[str, Mapping[str, float]]  # by matrix and form
GAP = 1e-4  # of the optimum: a share that nobody would notice, and the last digits take the solver longest
EXACT = 1e-12  # of a limit: what sums of some hundred numbers may be off


@dataclass(frozen=True)
class FormChoice:
    """A form for each matrix, with what they sum up to."""

    forms: Mapping[str, str]
    loss: float
    size: float


def smallest(losses: Table, sizes: Table, most: float) -> FormChoice | None:
    """Return the least size with a loss of at most `most`; None if there is none.

    Args:
        losses: what a matrix costs in a form.
        sizes: its bytes.
        most: in the unit of losses.
    """
    return _solved(losses, sizes, sizes, losses, most)


def best(losses: Table, sizes: Table, most: float) -> FormChoice | None:
    """Return the least loss with a size of at most `most`; None if there is none."""
    return _solved(losses, sizes, losses, sizes, most)


def front(losses: Table, sizes: Table, points: int) -> list[FormChoice]:
    """Return choices that no other is better than, by size from the least to that of the least loss, evenly spaced."""
    least = sum(min(forms.values()) for forms in sizes.values())
    most = sum(min((losses[name][form], size) for form, size in forms.items())[1] for name, forms in sizes.items())
    found: list[FormChoice] = []
    for limit in np.linspace(least, most, points):
        choice = best(losses, sizes, float(limit) + 0.5)  # half a byte, so that rounding excludes nothing
        if choice and (not found or choice.loss < found[-1].loss):
            found.append(choice)
    return found


def _solved(losses: Table, sizes: Table, least: Table, limited: Table, limit: float) -> FormChoice | None:
    """Return the forms with the least sum of `least` whose sum of `limited` is within the limit.

    The solver takes a set for one that keeps to a limit where it is a millionth over it. Then it is asked again for a
    little less.
    """
    asked, step = limit, 1.0
    while (forms := _forms(losses, least, limited, asked)) is not None:
        over = summed(limited, forms) - limit
        if over <= EXACT * max(1.0, abs(limit)):
            return FormChoice(forms, summed(losses, forms), summed(sizes, forms))
        asked, step = limit - step * over, 2 * step
    return None


def _forms(losses: Table, least: Table, limited: Table, limit: float) -> dict[str, str] | None:
    """Return the same, to the solver's tolerance."""
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
    """Return what a set of forms adds up to."""
    return float(sum(table[name][form] for name, form in forms.items()))


USUAL = (INT4, INT8)
POINTS = 33  # of the front
LEFT = 0.01  # of the worst set's loss: what is left where points that are measured end
Row = Mapping[str, Any]  # of the step sensitivity


@dataclass(frozen=True)
class SearchCase:
    """What there is to choose from.

    Attributes:
        losses: nats by matrix and form, of the forms that the search may take.
        sizes: their bytes.
        every: both again, with INT4 and INT8 whether the search may take them or not.
        fixed: bytes of everything else that a pass reads.
        kept: of these, those of matrices.
        numbers: of all matrices.
    """

    losses: Table
    sizes: Table
    every: tuple[Table, Table]
    fixed: int
    kept: int
    numbers: int

    def chosen(self, budget: Mapping[str, float]) -> FormChoice | None:
        """Return what a budget buys."""
        ((name, limit),) = budget.items()
        if name == "perplexity":
            return smallest(self.losses, self.sizes, math.log(limit))
        most = limit - self.fixed if name == "bytes_per_token" else limit * self.numbers / 8 - self.kept
        return best(self.losses, self.sizes, most)

    def least(self, name: str) -> tuple[float, float]:
        """Return the smallest budget that some forms keep to, and how much of it the search does not choose."""
        if name == "perplexity":
            return math.exp(sum(min(row.values()) for row in self.losses.values())), 1.0
        size = sum(min(row.values()) for row in self.sizes.values())
        if name == "bytes_per_token":
            return size + self.fixed, self.fixed
        return 8 * (size + self.kept) / self.numbers, 8 * self.kept / self.numbers

    def described(self, choice: FormChoice) -> Row:
        """Return what is foreseen of a choice."""
        bits = 8 * (choice.size + self.kept) / self.numbers
        growth = math.exp(choice.loss)
        return {"kl": choice.loss, "perplexity": growth, "bytes": choice.size + self.fixed, "bits_per_weight": bits}


def searched(
    parts: Sequence[Part],
    costs: Sequence[Mapping[str, Row]],
    budget: Mapping[str, float],
    forms: Sequence[str] = USUAL,
    points: int = 0,
) -> Row:
    """Return the forms with the least loss, or the fewest bytes, that keep to a budget.

    Args:
        parts: of layers and heads.
        costs: of the matrices of each, by path; the slices of a head add up.
        budget: one of perplexity (its growth as a factor), bytes_per_token, bits_per_weight.
        forms: that the search may take. One with more bytes than INT8 is taken only where fp16 is among them, since
            the plan of the programs goes by the largest.
        points: how many sets of forms along the front are to be described for a measurement.

    Raises:
        ConfigError: no forms keep to the budget, or a matrix can have none of the forms.
    """
    case = _case(parts, costs, forms)
    chosen = case.chosen(budget)
    if chosen is None:
        ((name, limit),) = budget.items()
        least, given = case.least(name)
        beside = f", {amount(name, given)} of it for vectors and for experts, which stay in int8"
        raise ConfigError(
            f"convert.budget.{name}: no forms keep to {amount(name, limit)}: with {', '.join(forms)} it is "
            f"{at_least(name, least)} at least{'' if name == 'perplexity' else beside}"
        )
    found: dict[str, Any] = {"budget": dict(budget), "forms": chosen.forms, "estimate": case.described(chosen)}
    found["front"] = [case.described(choice) for choice in front(case.losses, case.sizes, POINTS)]
    found |= {"costs": case.losses, "sizes": case.sizes}
    if points:
        named = {"chosen": chosen, **_uniform(case), **_spread(case, points)}
        found["points"] = {n: {"forms": one.forms, "estimate": case.described(one)} for n, one in named.items()}
    return found


def _case(parts: Sequence[Part], costs: Sequence[Mapping[str, Row]], forms: Sequence[str]) -> SearchCase:
    """Return all of it in tables."""
    losses, sizes = every = _tables(parts, costs, tuple(dict.fromkeys([*forms, *USUAL])))
    largest = FP16 if FP16 in forms else INT8
    allowed = {
        path: [name for name in forms if name in row and (name in USUAL or row[name] <= _bytes(parts, path, largest))]
        for path, row in sizes.items()
    }
    for path, names in allowed.items():
        if not names:
            raise ConfigError(f"convert.search.forms: {', '.join(forms)}: none of them fits {path}; add int8")
    own = [{path: {name: row[path][name] for name in names} for path, names in allowed.items()} for row in every]
    rest = [shape for part in parts for path, shape in part.shapes.items() if path not in sizes]
    others = [(len(shape), stored_bytes(INT8, shape)) for shape in rest]
    fixed, kept = sum(size for _, size in others), sum(size for axes, size in others if axes == MATRIX)
    numbers = sum(math.prod(shape) for part in parts for shape in matrices(part.shapes).values())
    return SearchCase(own[0], own[1], (losses, sizes), fixed, kept, numbers)


def _bytes(parts: Sequence[Part], path: str, form: str) -> int:
    """Return the bytes of a matrix in a form, over all slices of a head that share it."""
    return sum(stored_bytes(form, part.shapes[path]) for part in parts if path in part.shapes)


def _tables(
    parts: Sequence[Part], costs: Sequence[Mapping[str, Row]], forms: Sequence[str]
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Return nats and bytes by matrix and form, of the forms that fit."""
    losses: dict[str, dict[str, float]] = {}
    sizes: dict[str, dict[str, float]] = {}
    known = [row for rows in costs for row in rows.values() if row["errors"][INT4]]
    usual = median(max(row["kl"], 0.0) / row["errors"][INT4] for row in known) if known else 0.0
    for part, rows in zip(parts, costs, strict=True):
        for path, row in rows.items():
            fitting = [form for form in forms if not misfit(form, part.shapes[path])]
            loss, size = (table.setdefault(path, dict.fromkeys(fitting, 0.0)) for table in (losses, sizes))
            for form in loss:
                exact = not row["errors"][INT4]  # a matrix that was INT4 before: what an error costs it is not known
                rate = usual if exact else max(row["kl"], 0.0) / row["errors"][INT4]
                loss[form] += rate * row["errors"][form]
                size[form] += stored_bytes(form, part.shapes[path])
    return losses, sizes


def _uniform(case: SearchCase) -> dict[str, FormChoice]:
    """Return INT4 with the last matrices in INT8, and INT8."""
    found = {name: {path: RULES[name].form(path) for path in case.losses} for name in USUAL}
    return {name: FormChoice(forms, *(summed(table, forms) for table in case.every)) for name, forms in found.items()}


def _spread(case: SearchCase, count: int) -> dict[str, FormChoice]:
    """Return points of the front, evenly spaced in bytes from the fewest on.

    Beyond their end, little is left to win.
    """
    least = sum(min(row.values()) for row in case.sizes.values())
    worst = best(case.losses, case.sizes, least + 0.5)
    assert worst is not None, "the set of the smallest forms keeps to its own size"
    end = smallest(case.losses, case.sizes, LEFT * worst.loss) or front(case.losses, case.sizes, 2)[-1]
    limits = np.linspace(least, max(end.size, least), count)
    found = [best(case.losses, case.sizes, float(limit) + 0.5) for limit in limits]
    return {f"front_{i + 1}": choice for i, choice in enumerate(found) if choice}
