"""A judgement as people and machines read it: text, Markdown, JSON, SARIF 2.1.0, annotations of GitHub.

Names come from a model's author: whatever prints them replaces what a terminal or a page could obey.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from portable_coreml.files.bundle import is_bundle
from portable_coreml.judge.against import Against
from portable_coreml.judge.drift import percent
from portable_coreml.judge.limits import listed
from portable_coreml.judge.report import Group, JudgedFunction, Report, said_of

VERSION = 1  # of the JSON
SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
_SARIF_LEVELS = {"error": "error", "warn": "warning", "info": "note"}
_GITHUB_LEVELS = {"error": "error", "warn": "warning", "info": "notice"}
_FP16_MAX = 65504.0
_PLACES = 3  # named in texts; JSON has all
_PARTINGS = 5


def text_of(report: Report) -> Iterator[str]:
    """Yield the lines of a judgement."""
    yield f"{report.path}: ML Program, specification {report.specification}, {report.bytes:,} bytes"
    for function in report.functions:
        yield from _function(function)
    for part in report.parts:
        yield f"{part.file}: {part.bytes:,} bytes, taken by {listed(part.systems)}"
    for group in report.findings:
        yield f"{group.level}: {group.rule}: {_places(group)}: {_said(group)}; {group.remedy}"
    if report.against is not None:
        yield from text_of_against(report.path, report.against)
    yield f"{report.path}: {_counts(report)}"


def text_of_against(path: str, against: Against) -> Iterator[str]:
    """Yield the lines of a comparison."""
    yield f"{path} against {against.other}, in fp32; up to {percent(against.bound)} counts as the same"
    for pair in against.outputs:
        other = "" if pair.other == pair.name else f" and '{pair.other}'"
        yield (
            f"  output '{pair.name}'{other}: "
            + ("the same, " if pair.same else "differ by ")
            + percent(pair.difference)
        )
    for parting in against.partings[:_PARTINGS]:
        yield f"  {'inside alone ' if against.same else ''}parts at {said_of(parting)}"
    if len(against.partings) > _PARTINGS:
        yield f"  and at {len(against.partings) - _PARTINGS} more"
    known = sum(pair.same for pair in against.rows)
    yield f"  {known} of {len(against.rows)} values have a counterpart; {against.alone} of the other's have none"


def markdown_of(reports: Iterable[Report], refused: Mapping[str, str]) -> str:
    """Return a summary in Markdown: a table of findings for each file."""
    lines = []
    for report in reports:
        lines += [
            f"### {_code(report.path)}",
            "",
            f"{_counts(report)}. ML Program, specification {report.specification}, {report.bytes:,} bytes.",
            "",
        ]
        for function in report.functions:
            lines += [f"- {_cell(line.strip())}" for line in _function(function)]
        lines += [
            f"- {_code(part.file)}: {part.bytes:,} bytes, taken by {listed(part.systems)}" for part in report.parts
        ]
        if report.findings:
            lines += ["", "| | rule | where | what | what to do instead |", "|---|---|---|---|---|"]
        for group in report.findings:
            where = _code(group.places[0]) + (f" and {len(group.places) - 1} more" if len(group.places) > 1 else "")
            cells = (group.level, group.rule, where, _cell(_said(group)), _cell(group.remedy))
            lines.append(f"| {' | '.join(cells)} |")
        if report.against is not None:
            lines += ["", *(f"- {_cell(line.strip())}" for line in text_of_against(report.path, report.against))]
        lines.append("")
    lines += [f"- {_code(path)} can't be judged: {_cell(why)}" for path, why in refused.items()]
    return "\n".join(lines).rstrip("\n") + "\n"


def json_of(reports: Iterable[Report], refused: Mapping[str, str]) -> dict[str, Any]:
    """Return what was found as JSON's types; a number that is infinite is null."""
    return {
        "version": VERSION,
        "reports": [_plain(asdict(report)) for report in reports],
        "refused": [{"path": path, "why": why} for path, why in refused.items()],
    }


def json_of_against(path: Path, against: Against) -> dict[str, Any]:
    """Return a comparison as JSON's types."""
    return {"version": VERSION, "path": str(path), "against": _plain(asdict(against))}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sarif_of(reports: Sequence[Report], version: str) -> dict[str, Any]:
    """Return the findings as a SARIF log: one run, one result for each finding, its place the file of the program.

    Args:
        reports: the judgements.
        version: of portable-coreml.
    """
    groups = [(report, group) for report in reports for group in report.findings]
    rules = {
        group.rule: {"id": group.rule, "shortDescription": {"text": printable(group.title)}} for _, group in groups
    }
    results = []
    for report, group in groups:
        physical = {"artifactLocation": {"uri": _in_repository(report.path)}, "region": {"startLine": 1}}
        logical = [{"fullyQualifiedName": printable(place)} for place in group.places]
        results.append(
            {
                "ruleId": group.rule,
                "level": _SARIF_LEVELS[group.level],
                "message": {"text": printable(f"{_places(group)}: {_said(group)}. {group.remedy}")},
                "locations": [{"physicalLocation": physical, "logicalLocations": logical}],
                "partialFingerprints": {"rule/v1": f"{report.path} {group.rule}"},
            }
        )
    driver = {"name": "portable-coreml judge", "version": version, "rules": list(rules.values())}
    return {"$schema": SARIF, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def annotations_of(report: Report) -> Iterator[str]:
    """Yield GitHub's commands that put errors and warnings beside the files of a pull request."""
    for group in report.findings:
        if group.level != "info":
            file, title = (
                _escaped(text, ":,") for text in (_in_repository(report.path), f"{group.rule}: {group.title}")
            )
            said = _escaped(f"{_places(group)}: {_said(group)}; {group.remedy}")
            yield f"::{_GITHUB_LEVELS[group.level]} file={file},title={title}::{said}"


def _escaped(text: str, more: str = "") -> str:
    """Return text as GitHub's commands take it."""
    for character in "%" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return printable(text)


def printable(text: str) -> str:
    """Return text with every unprintable character replaced, so that no terminal obeys it."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _in_repository(path: str) -> str:
    """Return the file of a package or bundle that a page can show: a package is a folder."""
    if is_bundle(Path(path)):
        return f"{path}/model.mil"
    return f"{path}/Manifest.json" if Path(path).is_dir() else path


def _function(function: JudgedFunction) -> Iterator[str]:
    shown, placed = function.shown, function.placed
    yield f"function {shown.name} ({shown.opset}): {sum(count for _, count in shown.operations)} operations"
    fed = {domain.name: domain for domain in function.domains}
    for kind, items in (("input", shown.inputs), ("output", shown.outputs), ("state", shown.states)):
        for item in items:
            domain = fed.get(item.name) if kind == "input" else None
            how = "" if domain is None else f"; fed with {_fed(domain.kind, domain.low, domain.high)} ({domain.why})"
            yield f"  {kind} {item.name}: {item.dtype} {item.shape}{how}"
    share = _shares(function.off_operations, function.off_bytes) or "an unknown share of the work"
    counts = f"{placed.get('eligible', 0)} operations can run on the Neural Engine, {placed.get('ineligible', 0)} can't"
    yield f"  by the rules, {counts}, {placed.get('unknown', 0)} are in no rule; off it: {share}"
    if function.not_run:
        yield f"  not run: {function.not_run}"
    outputs = [row for row in function.rows if row.output in function.outputs]
    if outputs:
        worst, largest = max(outputs, key=lambda r: r.total), max(function.rows, key=lambda r: r.largest)
        half = sum(row.dtype == "fp16" for row in function.rows)
        worst_is = f"output '{worst.output}' is off by {percent(worst.total)}, the most of {len(outputs)}"
        yield f"  {half} of {len(function.rows)} results are declared fp16; {worst_is}"
        share = f"{largest.largest / _FP16_MAX:.2g} of what fp16 holds"
        yield f"  the largest number is {largest.largest:.3g}, {share}, in {largest.kind} '{largest.output}'"


def _fed(kind: str, low: float, high: float) -> str:
    words = {"normal": "normal numbers of variance 1", "positive": "magnitudes of normal numbers", "given": "arrays"}
    return f"{low:g} to {high:g}" if kind == "range" else words.get(kind, kind)


def _said(group: Group) -> str:
    costs = _shares(group.operations, group.bytes)
    evidence = f"{group.evidence}{f', confidence {group.confidence}' if group.confidence else ''}"
    more = f", and {group.count - 1} more" if group.count > 1 else ""
    return f"{group.why}{more}{f'; {costs}' if costs else ''} ({evidence})"


def _places(group: Group) -> str:
    more = len(group.places) - _PLACES
    return ", ".join(group.places[:_PLACES]) + (f" and {more} more" if more > 0 else "")


def _shares(operations: float | None, bytes_: float | None) -> str:
    if operations is None or bytes_ is None:
        return ""
    return f"{operations:.1%} of arithmetic, {bytes_:.1%} of bytes"


def _counts(report: Report) -> str:
    levels = [group.level for group in report.findings]
    return f"{levels.count('error')} errors, {levels.count('warn')} warnings, {levels.count('info')} remarks"


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', '?').replace('|', '?')}`"


def _cell(text: str) -> str:
    """Return text as Markdown shows it as it stands, on one line of a table."""
    made = printable(" ".join(text.split()))
    for character in "\\`*_<>[]|#":
        made = made.replace(character, f"\\{character}")
    return made
