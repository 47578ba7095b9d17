"""The evidence beside a build: what of it is the build's, and what is left of older programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.evidence.file import Evidence, of_build, read_result

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Contradiction:
    """An operation that a rule or the lack of one placed elsewhere than the device's plan did."""

    part: str
    output: str
    operation: str
    predicted: str
    rules: tuple[str, ...]
    measured: str


def read_evidence(files: Iterable[Path], manifest: Json) -> tuple[list[Evidence], list[str]]:
    """Return what files say of a build, and the names of those that are of other programs than it has now.

    Raises:
        ShardmillError: a file is no result of the lane, or was changed.
    """
    found, stale = [], []
    for path in files:
        evidence = of_build(path, read_result(path), manifest)
        if evidence is None:
            stale.append(path.name)
        else:
            found.append(evidence)
    return found, stale


def contradictions(evidence: Evidence, verdicts: Sequence[Json]) -> list[Contradiction]:
    """Return operations that a device's plan and the placement rules disagree about.

    Args:
        evidence: of a device.
        verdicts: the build's residency/PART.json; only those that predict have rules to contradict.
    """
    return [found for verdict in verdicts for found in _of_part(evidence, verdict)] if evidence.is_measured else []


def _of_part(evidence: Evidence, verdict: Json) -> Iterator[Contradiction]:
    from portable_coreml.judge.lint import diff_residency

    part, measured = verdict["part"], evidence.residency(verdict["part"])
    if verdict["evidence"] != "predicted" or not measured:
        return
    kinds = {row["output"]: row["operation"] for row in (*measured, *verdict["rows"])}
    for found in diff_residency(verdict["rows"], measured):
        yield Contradiction(part, found.output, kinds[found.output], found.predicted, found.rules, found.measured)
    small = [finding["rule"] for finding in verdict["findings"] if finding["rule"] == "W5"]
    chosen = [row for row in measured if row["status"] == "ane"]
    if small and chosen:
        first = chosen[0]
        yield Contradiction(part, first["output"], first["operation"], "left to the CPU", ("W5",), "prefers the engine")


def measured_verdicts(verdicts: Sequence[Json], devices: Sequence[Evidence]) -> tuple[Json, ...]:
    """Return residency part by part: what a device measured takes the place of what rules predicted."""
    return tuple(_better(verdict, devices) for verdict in verdicts)


def _better(verdict: Json, devices: Sequence[Evidence]) -> Json:
    """Return a part's verdict, or where that is a prediction, the first device's rows."""
    if verdict["evidence"] == "measured":
        return verdict
    for device in devices:
        if device.is_measured and (rows := device.residency(verdict["part"])):
            small = [finding for finding in verdict["findings"] if finding["rule"] == "W5"]  # the size is a fact
            return {**verdict, "evidence": "measured", "rows": rows, "findings": small}
    return verdict
