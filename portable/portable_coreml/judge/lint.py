"""What the `lint`, `diff-residency` and `compare-compiled` commands say, as rows; the command line only prints
them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable_coreml.files.bundle import frame, read_core_data
from portable_coreml.judge.placement import BY_ID, RULES, Target, judge_package
from portable_coreml.judge.placement.rule import SEVERITIES, Finding, Rule


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
    """Findings on a package or bundle, errors first. Raises ProgramError if it can't be read.

    The command exits non-zero if any row's severity is "error".
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


@dataclass(frozen=True)
class ResidencyDifference:
    """One operation on which a prediction and a measurement disagree, or that only one of them has."""

    function: str
    output: str
    predicted: str
    measured: str
    rules: tuple[str, ...]


MEASURED_ELIGIBLE = ("ane", "not_chosen")


def diff_residency(
    predicted: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]
) -> tuple[ResidencyDifference, ...]:
    """Rows of two residency reports compared by (function, output).

    A row has `function`, `output` and either `status` (as OpVerdict, or "ane" and "not_chosen" where measured) or
    `device` ("ne", "cpu", "gpu", "none", "unknown"). A prediction of "unknown" disagrees with nothing; what the engine
    could run and the dispatcher gave to another device is eligible, as predicted.
    """
    return tuple(_differences(_by_operation(predicted), _by_operation(measured)))


def _by_operation(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Rows by (function, output); of several, one per shape, the first that is not eligible."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in rows:
        key = (row.get("function", "main"), row["output"])
        if key not in found or _status(found[key]) == "eligible":
            found[key] = row
    return found


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
        return "eligible" if row["status"] in MEASURED_ELIGIBLE else str(row["status"])
    device = str(row.get("device", "unknown")).lower()
    words = {"ne": "eligible", "ane": "eligible", "cpu": "ineligible", "gpu": "ineligible", "none": "no_device"}
    return words.get(device, "unknown")


@dataclass(frozen=True)
class BundleDifference:
    """One file in which two compiled bundles differ, and how."""

    file: str
    what: str


def compare_compiled(first: Path, second: Path) -> tuple[BundleDifference, ...]:
    """How two compiled bundles of one package differ, but for buildInfo and the order of map entries.

    For the first person who has both compilers: `coremlc`'s bundle and ours should give no difference.
    """
    found = {p.relative_to(b) for b in (first, second) for p in b.rglob("*") if p.is_file()}
    names = sorted(str(name) for name in found if not name.name.startswith("."))  # Snakemake's mark, the Finder's
    return tuple(BundleDifference(name, what) for name in names if (what := _compare_file(name, first, second)))


def _compare_file(name: str, first: Path, second: Path) -> str:
    one, two = first / name, second / name
    if not one.is_file() or not two.is_file():
        return f"only in {(first if one.is_file() else second).name}"
    if one.read_bytes() == two.read_bytes() or name == "metadata.json":
        return ""
    if name == "model.mil":
        return _compare_text(*(path.read_text(encoding="utf-8", errors="replace") for path in (one, two)))
    if name == "coremldata.bin" and read_core_data(one) == read_core_data(two):
        return _compare_frames(frame(one), frame(two))
    return f"{one.stat().st_size} and {two.stat().st_size} bytes, not the same"


def _compare_frames(one: tuple[bytes, bytes], two: tuple[bytes, bytes]) -> str:
    """Headers and trailers of two coremldata.bin whose descriptions are equal."""
    for what, mine, theirs in zip(("headers", "trailers"), one, two, strict=True):
        if mine != theirs:
            at = next(i for i in range(len(mine) + 1) if mine[: i + 1] != theirs[: i + 1])
            pair = " and ".join(side[at : at + 1].hex() or "nothing" for side in (mine, theirs))
            return f"the {what} differ, first at their byte {at}: {pair}"
    return ""


def _compare_text(one: str, two: str) -> str:
    texts = [text.rstrip("\n").split("\n") for text in (one, two)]
    mine, theirs = ([line for line in lines if not line.startswith("[buildInfo")] for lines in texts)
    changed = [line for line in difflib.unified_diff(mine, theirs, lineterm="", n=0) if line[:1] in "+-"][2:]
    return "" if not changed else f"{len(changed)} lines differ, the first: {changed[0][:200]}"


def rules_page() -> str:
    """docs/ane-rules.md: the rule book for people, written from the rules themselves."""
    head = (
        "# What keeps a program on the Neural Engine\n\n"
        "Written from `portable/portable_coreml/judge/placement/rules/` by `python -m portable_coreml.judge.lint`; "
        "change the rules, not this page.\n\n"
        "Nothing here was measured by this project. Confidence: A = Apple says it; B = measured by two parties, or by "
        "one with published method and data; C = one party, one machine; D = contradicted. *Eligible* is what the "
        "rules predict; what Core ML's dispatcher then chooses depends on its estimate of cost as well.\n"
    )
    return head + "".join(_section(rule) for rule in sorted(RULES, key=lambda rule: SEVERITIES.index(rule.severity)))


def _section(rule: Rule) -> str:
    sources = "; ".join(f"{s.origin}, {s.place}" if s.place else s.origin for s in rule.sources)
    lines = [
        f"\n## {rule.id}: {rule.title}\n",
        f"- severity: {rule.severity}; confidence: {rule.confidence}; holds for: {rule.scope.os}, {rule.scope.chips}",
        f"- instead: {rule.remedy}",
        f"- sources: {sources}",
    ]
    if rule.contested:
        lines.append(f"- contested: {rule.contested}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(rules_page(), end="")
