"""Which matrix to look at first where precision missed a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardmill.gates.rounding import kept_db
from shardmill.gates.thresholds import COST
from shardmill.gates.weights import PackageWeights


def named(rows: Iterable[Mapping[str, Any]], worst: Callable[[], str]) -> list[dict[str, Any]]:
    """A verdict's rows, of which the first that missed what precision may cost names the worst matrix.

    Args:
        rows: of `measurement.compare`.
        worst: says which that is; called only if there is such a row.
    """
    found = [dict(row) for row in rows]
    missed = next((row for row in found if row["question"] == COST and not row["passed"]), None)
    if missed:
        missed["detail"] = "; ".join(filter(None, [missed["detail"], worst()]))
    return found


def furthest(held: Iterable[PackageWeights], source: Path) -> str:
    """Names the matrix that lost most of its numbers, or '' where none lost anything.

    Args:
        held: the weights of a program, or of several.
        source: the checkpoint's folder.
    """
    kept = [(db, one.part.in_model(path)) for one in held for path, db in kept_db(one, source).items()]
    least, path = min(kept, default=(math.inf, ""))
    return f"{path} is stored furthest from the checkpoint's, {least:.1f} dB" if least < math.inf else ""
