"""Measurements of a gate, compared with the thresholds: the rows of a verdict, and an error about failed ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardmill.errors import GateError
from shardmill.gates.thresholds import THRESHOLDS, Allowed, Threshold


@dataclass(frozen=True)
class Measurement:
    """One number that a gate measured; `name` is a key of THRESHOLDS."""

    name: str
    value: float
    detail: str = ""
    allowed: Allowed | None = None  # the limit that the model itself allows, if it is stricter than the threshold


@dataclass(frozen=True)
class NotRun:
    """A number that could not be measured or would mean nothing, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Margin:
    """How close two logits may be that can change places if two widths of a pass round to fp16 differently."""

    value: float


@dataclass(frozen=True)
class Stretch:
    """The mean KL divergence at some positions [start, stop) of a long text, which no threshold judges."""

    start: int
    stop: int
    kl: float


def compare(
    measurements: Iterable[Measurement], thresholds: Mapping[str, Threshold] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a verdict, passed or not: each number with its threshold and meaning.

    Args:
        measurements: the numbers.
        thresholds: the thresholds to apply; by default the table, see gates/thresholds.py.
    """
    rows = []
    for m in measurements:
        threshold = (thresholds or THRESHOLDS)[m.name]
        stricter = {} if m.allowed is None or m.allowed.limit >= threshold.limit else {"limit_why": m.allowed.why}
        if m.allowed and stricter:
            threshold = replace(threshold, limit=m.allowed.limit)
        measured = {"name": m.name, "value": m.value, "detail": m.detail}
        rows.append({**measured, "threshold": threshold.told, "passed": threshold.holds(m.value)})
        rows[-1] |= {"question": threshold.question, "meaning": threshold.meaning, **stricter}
    return rows


def demand(gate: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise GateError, naming each number that missed its threshold, unless all passed."""
    missed = [row for row in rows if not row["passed"]]
    if missed:
        raise GateError(f"{gate}: {'; '.join(map(describe, missed))}")


def describe(row: Mapping[str, Any]) -> str:
    """Return a text with a number's name, value and threshold."""
    detail = f" ({row['detail']})" if row["detail"] else ""
    why = f": {row['limit_why']}" if "limit_why" in row else ""
    return f"{row['name']} is {_told(row['value'], row['threshold'])}, must be {row['threshold']}{detail}{why}"


def nearness(row: Mapping[str, Any]) -> float:
    """Return a number that grows as a row's value nears and passes its own limit."""
    sign, limit = row["threshold"].split()
    value: float = row["value"]
    return -value if sign == ">=" else value / float(limit) if float(limit) > 0 else value


def _told(value: float, threshold: str) -> str:
    """Format a number with enough digits to show on which side of the limit it lies: 1.0101 for a limit of 1.01."""
    limit = float(threshold.split()[-1])
    tries = (f"{value:.{digits}g}" for digits in range(3, 17))
    sided = (text for text in tries if (float(text) > limit, float(text) < limit) == (value > limit, value < limit))
    return next(sided, f"{value:.3g}")
