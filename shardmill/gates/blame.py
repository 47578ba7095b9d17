"""Names the matrix to look at first when the precision of the weights missed a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardmill.gates.rounding import kept_db
from shardmill.gates.thresholds import COST
from shardmill.gates.weights import PackageWeights


def named(rows: Iterable[Mapping[str, Any]], worst: Callable[[], str]) -> list[dict[str, Any]]:
    """Return a verdict's rows; the first row that missed a limit of question 3 also names the worst matrix.

    Args:
        rows: the result of `measurement.compare`.
        worst: returns a text that names the worst matrix; called only if a row missed a limit.
    """
    found = [dict(row) for row in rows]
    missed = next((row for row in found if row["question"] == COST and not row["passed"]), None)
    if missed:
        missed["detail"] = "; ".join(filter(None, [missed["detail"], worst()]))
    return found


def furthest(held: Iterable[PackageWeights], source: Path) -> str:
    """Return a text that names the matrix with the lowest signal-to-noise ratio, or '' if no matrix lost anything.

    Args:
        held: the weights of one or more programs.
        source: the checkpoint's folder.
    """
    kept = [(db, one.part.in_model(path)) for one in held for path, db in kept_db(one, source).items()]
    least, path = min(kept, default=(math.inf, ""))
    return f"{path} is stored furthest from the checkpoint's, {least:.1f} dB" if least < math.inf else ""
