"""Lint: the findings of the placement rules on one model, as rows to print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from portable_coreml.judge.placement import BY_ID, Target, judge_package
from portable_coreml.judge.placement.rule import SEVERITIES, Finding


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
    """Judges a package or bundle by the placement rules.

    Args:
        path: an .mlpackage, an .mlmodel or an .mlmodelc.
        target: the machine to judge for; an M4 Mac if left out.

    Returns:
        The findings, errors first. A command that prints them exits non-zero if any severity is "error".

    Raises:
        ProgramError: the model can't be read.
    """
    findings = judge_package(path, target).findings
    return tuple(_row(f) for f in sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.rule, f.output)))


def _row(finding: Finding) -> LintRow:
    rule = BY_ID[finding.rule]
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
