"""From what matrices cost one by one to the forms that a budget buys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardmill.forms.form import INT4, INT8, MATRIX, matrices, stored_bytes
from shardmill.plan import Part
from shardmill.precision.search import Choice, Table, best, front, smallest

FORMS = (INT4, INT8)
POINTS = 33  # of the front
Row = Mapping[str, Any]  # of the step sensitivity


def searched(parts: Sequence[Part], costs: Sequence[Mapping[str, Row]], budget: Mapping[str, float]) -> Row | None:
    """The forms with the least loss, or the fewest bytes, that keep to a budget; None if none do.

    Args:
        parts: of layers and heads.
        costs: of the matrices of each, by path; the slices of a head add up.
        budget: one of perplexity (its growth as a factor), bytes_per_token, bits_per_weight.
    """
    losses, sizes = _tables(parts, costs)
    rest = [shape for part in parts for path, shape in part.shapes.items() if path not in sizes]
    others = [(len(shape), stored_bytes(INT8, shape)) for shape in rest]
    fixed, kept = sum(size for _, size in others), sum(size for axes, size in others if axes == MATRIX)
    numbers = sum(math.prod(shape) for part in parts for shape in matrices(part.shapes).values())

    def described(choice: Choice) -> Row:
        bits = 8 * (choice.size + kept) / numbers
        growth = math.exp(choice.loss)
        return {"kl": choice.loss, "perplexity": growth, "bytes": choice.size + fixed, "bits_per_weight": bits}

    ((name, limit),) = budget.items()
    if name == "perplexity":
        chosen = smallest(losses, sizes, math.log(limit))
    else:
        chosen = best(losses, sizes, limit - fixed if name == "bytes_per_token" else limit * numbers / 8 - kept)
    if chosen is None:
        return None
    points = [described(choice) for choice in front(losses, sizes, POINTS)]
    found = {"budget": dict(budget), "forms": chosen.forms, "estimate": described(chosen)}
    return found | {"front": points, "costs": losses, "sizes": sizes}


def _tables(parts: Sequence[Part], costs: Sequence[Mapping[str, Row]]) -> tuple[Table, Table]:
    """Nats and bytes by matrix and form."""
    losses: dict[str, dict[str, float]] = {}
    sizes: dict[str, dict[str, float]] = {}
    for part, rows in zip(parts, costs, strict=True):
        for path, row in rows.items():
            loss, size = (table.setdefault(path, dict.fromkeys(FORMS, 0.0)) for table in (losses, sizes))
            for form in FORMS:
                share = row["errors"][form] / row["errors"][INT4] if row["errors"][INT4] else 0.0
                loss[form] += max(row["kl"], 0.0) * share
                size[form] += stored_bytes(form, part.shapes[path])
    return losses, sizes
