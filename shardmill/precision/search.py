"""The cheapest set of forms under a budget, as an integer program; scipy's HiGHS solves it exactly.

The loss of a set of forms is estimated as the sum of the losses of its matrices. For small errors the loss grows
linearly in the squared errors of single matrices ("Pushing the Limits of Large Language Model Quantization via the
Linearity Theorem", https://arxiv.org/abs/2411.17525). Measurements show how well the sum predicts the real loss.
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
GAP = 1e-4  # share of the optimum, too small to matter: the last digits take the solver longest
EXACT = 1e-12  # share of a limit: the rounding error of a sum of some hundred numbers


@dataclass(frozen=True)
class FormChoice:
    """A form for each matrix, with their total loss and size."""

    forms: Mapping[str, str]
    loss: float
    size: float


def smallest(losses: Table, sizes: Table, most: float) -> FormChoice | None:
    """Return the smallest choice with a loss of at most `most`; None if no choice meets this limit.

    Args:
        losses: the loss of each matrix in each form.
        sizes: the bytes of each matrix in each form.
        most: the limit, in the unit of losses.
    """
    return _solved(losses, sizes, sizes, losses, most)


def best(losses: Table, sizes: Table, most: float) -> FormChoice | None:
    """Return the choice of least loss with a size of at most `most`; None if no choice meets this limit."""
    return _solved(losses, sizes, losses, sizes, most)


def front(losses: Table, sizes: Table, points: int) -> list[FormChoice]:
    """Return Pareto-optimal choices, evenly spaced from the least size to the size of the least loss."""
    least = sum(min(forms.values()) for forms in sizes.values())
    most = sum(min((losses[name][form], size) for form, size in forms.items())[1] for name, forms in sizes.items())
    choices: list[FormChoice] = []
    for limit in np.linspace(least, most, points):
        choice = best(losses, sizes, float(limit) + 0.5)  # half a byte, so that rounding excludes nothing
        if choice and (not choices or choice.loss < choices[-1].loss):
            choices.append(choice)
    return choices


def _solved(losses: Table, sizes: Table, least: Table, limited: Table, limit: float) -> FormChoice | None:
    """Return the forms with the least sum of `least` whose sum of `limited` is within the limit.

    The solver accepts a set that exceeds the limit by a millionth. In that case it is asked again with a slightly
    lower limit.
    """
    asked, step = limit, 1.0
    while (forms := _forms(losses, least, limited, asked)) is not None:
        over = summed(limited, forms) - limit
        if over <= EXACT * max(1.0, abs(limit)):
            return FormChoice(forms, summed(losses, forms), summed(sizes, forms))
        asked, step = limit - step * over, 2 * step
    return None


def _forms(losses: Table, least: Table, limited: Table, limit: float) -> dict[str, str] | None:
    """Return the forms from one run of the solver, which keep to the limit within the solver's tolerance."""
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
    """Return the sum of a table's entries for a set of forms."""
    return float(sum(table[name][form] for name, form in forms.items()))


USUAL = (INT4, INT8)
POINTS = 33  # of the front
LEFT = 0.01  # share of the worst set's loss that is left at the last measured point
Row = Mapping[str, Any]  # of the step sensitivity


@dataclass(frozen=True)
class SearchCase:
    """The input of a search.

    Attributes:
        losses: nats by matrix and form, for the forms that the search may take.
        sizes: bytes by matrix and form, for the same forms.
        every: losses and sizes again, with INT4 and INT8 even if the search may not take these forms.
        fixed: bytes of all other constants that a pass reads.
        kept: bytes of the matrices among these constants.
        numbers: how many numbers all matrices hold.
    """

    losses: Table
    sizes: Table
    every: tuple[Table, Table]
    fixed: int
    kept: int
    numbers: int

    def chosen(self, budget: Mapping[str, float]) -> FormChoice | None:
        """Return the best choice under a budget; None if no choice keeps to it."""
        ((name, limit),) = budget.items()
        if name == "perplexity":
            return smallest(self.losses, self.sizes, math.log(limit))
        most = limit - self.fixed if name == "bytes_per_token" else limit * self.numbers / 8 - self.kept
        return best(self.losses, self.sizes, most)

    def least(self, name: str) -> tuple[float, float]:
        """Return the smallest feasible budget, and the amount in that budget that the search can't change."""
        if name == "perplexity":
            return math.exp(sum(min(row.values()) for row in self.losses.values())), 1.0
        size = sum(min(row.values()) for row in self.sizes.values())
        if name == "bytes_per_token":
            return size + self.fixed, self.fixed
        return 8 * (size + self.kept) / self.numbers, 8 * self.kept / self.numbers

    def described(self, choice: FormChoice) -> Row:
        """Return the estimates for a choice."""
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
        parts: the parts with layers and heads.
        costs: for each part the costs of its matrices, by path; the costs of a head's slices add up.
        budget: one of perplexity (its growth as a factor), bytes_per_token, bits_per_weight.
        forms: the forms that the search may take. A form with more bytes than INT8 is taken only if fp16 is among
            the forms, since the plan of the programs is made for the largest form.
        points: how many sets of forms along the front to describe for a measurement.

    Raises:
        ConfigError: no forms keep to the budget, or no form fits a matrix.
    """
    case = _case(parts, costs, forms)
    chosen = case.chosen(budget)
    if chosen is None:
        ((name, limit),) = budget.items()
        least, fixed = case.least(name)
        beside = f", {amount(name, fixed)} of it for vectors and for experts, which stay in int8"
        raise ConfigError(
            f"convert.budget.{name}: no forms keep to {amount(name, limit)}: with {', '.join(forms)} it is "
            f"{at_least(name, least)} at least{'' if name == 'perplexity' else beside}"
        )
    description: dict[str, Any] = {"budget": dict(budget), "forms": chosen.forms, "estimate": case.described(chosen)}
    description["front"] = [case.described(choice) for choice in front(case.losses, case.sizes, POINTS)]
    description |= {"costs": case.losses, "sizes": case.sizes}
    if points:
        named = {"chosen": chosen, **_uniform(case), **_spread(case, points)}
        description["points"] = {n: {"forms": one.forms, "estimate": case.described(one)} for n, one in named.items()}
    return description


def _case(parts: Sequence[Part], costs: Sequence[Mapping[str, Row]], forms: Sequence[str]) -> SearchCase:
    """Return the input of a search in tables."""
    losses, sizes = every = _tables(parts, costs, tuple(dict.fromkeys([*forms, *USUAL])))
    largest = FP16 if FP16 in forms else INT8
    allowed = {
        path: [name for name in forms if name in row and (name in USUAL or row[name] <= _bytes(parts, path, largest))]
        for path, row in sizes.items()
    }
    for path, names in allowed.items():
        if not names:
            raise ConfigError(f"convert.search.forms: {', '.join(forms)}: none of them fits {path}; add int8")
    tables = [{path: {name: row[path][name] for name in names} for path, names in allowed.items()} for row in every]
    rest = [shape for part in parts for path, shape in part.shapes.items() if path not in sizes]
    others = [(len(shape), stored_bytes(INT8, shape)) for shape in rest]
    fixed, in_int8 = sum(size for _, size in others), sum(size for axes, size in others if axes == MATRIX)
    numbers = sum(math.prod(shape) for part in parts for shape in matrices(part.shapes).values())
    return SearchCase(tables[0], tables[1], (losses, sizes), fixed, in_int8, numbers)


def _bytes(parts: Sequence[Part], path: str, form: str) -> int:
    """Return the bytes of a matrix in a form, over all slices of a head that share it."""
    return sum(stored_bytes(form, part.shapes[path]) for part in parts if path in part.shapes)


def _tables(
    parts: Sequence[Part], costs: Sequence[Mapping[str, Row]], forms: Sequence[str]
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Return nats and bytes by matrix and form, for the forms that fit."""
    losses: dict[str, dict[str, float]] = {}
    sizes: dict[str, dict[str, float]] = {}
    known = [row for rows in costs for row in rows.values() if row["errors"][INT4]]
    usual = median(max(row["kl"], 0.0) / row["errors"][INT4] for row in known) if known else 0.0
    for part, rows in zip(parts, costs, strict=True):
        for path, row in rows.items():
            fitting = [form for form in forms if not misfit(form, part.shapes[path])]
            loss, size = (table.setdefault(path, dict.fromkeys(fitting, 0.0)) for table in (losses, sizes))
            for form in loss:
                exact = not row["errors"][INT4]  # the matrix was INT4 before: the cost of an error is not known
                rate = usual if exact else max(row["kl"], 0.0) / row["errors"][INT4]
                loss[form] += rate * row["errors"][form]
                size[form] += stored_bytes(form, part.shapes[path])
    return losses, sizes


def _uniform(case: SearchCase) -> dict[str, FormChoice]:
    """Return INT4 with the last matrices in INT8, and INT8."""
    by_name = {name: {path: RULES[name].form(path) for path in case.losses} for name in USUAL}
    return {name: FormChoice(forms, *(summed(table, forms) for table in case.every)) for name, forms in by_name.items()}


def _spread(case: SearchCase, count: int) -> dict[str, FormChoice]:
    """Return points of the front, evenly spaced in bytes from the fewest on.

    Beyond the last point, the loss can hardly fall further.
    """
    least = sum(min(row.values()) for row in case.sizes.values())
    worst = best(case.losses, case.sizes, least + 0.5)
    assert worst is not None, "the set of the smallest forms keeps to its own size"
    end = smallest(case.losses, case.sizes, LEFT * worst.loss) or front(case.losses, case.sizes, 2)[-1]
    limits = np.linspace(least, max(end.size, least), count)
    choices = [best(case.losses, case.sizes, float(limit) + 0.5) for limit in limits]
    return {f"front_{i + 1}": choice for i, choice in enumerate(choices) if choice}
