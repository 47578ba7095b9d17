"""Lint: the findings of the placement rules on one model, as rows to print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable_coreml.errors import ProgramError
from portable_coreml.files.model import read_json
from portable_coreml.judge.placement import judge_package
from portable_coreml.judge.rule import SEVERITIES, Finding, Target
from portable_coreml.judge.rules import RULES


@dataclass(frozen=True)
class LintRow:
    """One line of a lint report: where, which rule, why, what to do instead, and how sure the rule book is."""

    severity: str
    function: str
    operation: str
    rule: str
    title: str
    why: str
    remedy: str
    confidence: str


def lint(path: str | Path, target: Target | None = None) -> tuple[LintRow, ...]:
    """Judge a package or bundle by the placement rules.

    Args:
        path: an .mlpackage, an .mlmodel or an .mlmodelc.
        target: the machine whose rules apply; an M4 Mac if left out.

    Returns:
        The findings, errors first. A command that prints them exits non-zero if any severity is "error".

    Raises:
        ProgramError: the model can't be read.
    """
    findings = judge_package(path, target).findings
    return tuple(_row(f) for f in sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.rule, f.output)))


def _row(finding: Finding) -> LintRow:
    rule = RULES[finding.rule]
    return LintRow(
        finding.severity,
        finding.function,
        finding.output or "(program)",
        rule.id,
        rule.title,
        finding.why,
        finding.remedy,
        rule.confidence,
    )


@dataclass(frozen=True)
class ResidencyDifference:
    """One operation whose prediction and measurement differ, or that is only predicted or only measured."""

    function: str
    output: str
    predicted: str
    measured: str
    rules: tuple[str, ...]

    def __str__(self) -> str:
        because = f" ({', '.join(self.rules)})" if self.rules else ""
        return f"{self.function} {self.output}: predicted {self.predicted}{because}, measured {self.measured}"


_MEASURED_ELIGIBLE = ("ane", "not_chosen")


def diff_residency(
    predicted: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]
) -> tuple[ResidencyDifference, ...]:
    """Compare the rows of two residency reports by (function, output).

    A row has `function`, `output` and either `status` (as OpVerdict, or "ane" and "not_chosen" where measured) or
    `device` ("ne", "cpu", "gpu", "none", "unknown"). A prediction of "unknown" agrees with every measurement. An
    operation that the engine could run counts as eligible even if the dispatcher gave it to another device.
    """
    return tuple(_differences(_by_operation(predicted), _by_operation(measured)))


def _by_operation(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return rows by (function, output). Of several rows, one per shape, the first that is not eligible is kept."""
    by_operation: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in rows:
        key = (row.get("function", "main"), row["output"])
        if key not in by_operation or _status(by_operation[key]) == "eligible":
            by_operation[key] = row
    return by_operation


def _differences(
    ours: Mapping[tuple[str, str], Mapping[str, Any]], theirs: Mapping[tuple[str, str], Mapping[str, Any]]
) -> Iterator[ResidencyDifference]:
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        mine, other = _status(ours.get(key)), _status(theirs.get(key))
        if mine not in (other, "unknown"):
            yield ResidencyDifference(*key, mine, other, tuple(ours.get(key, {}).get("rules", ())))


def _status(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "absent"
    if "status" in row:
        return "eligible" if row["status"] in _MEASURED_ELIGIBLE else str(row["status"])
    device = str(row.get("device", "unknown")).lower()
    words = {"ne": "eligible", "ane": "eligible", "cpu": "ineligible", "gpu": "ineligible", "none": "no_device"}
    return words.get(device, "unknown")


def read_report(path: Path, evidence: str) -> list[dict[str, Any]]:
    """Return the rows of a residency report: a JSON object with `evidence` and `rows`.

    Args:
        path: the report's file.
        evidence: "predicted" or "measured"; a report of the other kind is refused.

    Raises:
        ProgramError: the file can't be read, or holds something else.
    """
    report = read_json(path)
    try:
        rows, recorded = [dict(row) for row in report["rows"]], report.get("evidence")
        _by_operation(rows)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise ProgramError(f"{path} is not a residency report: {type(error).__name__}: {error}") from error
    if recorded != evidence:
        raise ProgramError(f"{path} holds {recorded} rows, not {evidence} ones")
    return rows
