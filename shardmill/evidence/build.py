"""The evidence beside a build: the files about the build, and the files that are left from older programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.evidence.file import Evidence, of_build, read_result

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Contradiction:
    """An operation that the placement rules and the device's plan place differently."""

    part: str
    output: str
    operation: str
    predicted: str
    rules: tuple[str, ...]
    measured: str


def read_evidence(files: Iterable[Path], manifest: Json) -> tuple[list[Evidence], list[str]]:
    """Return the evidence of files for a build, and the names of files about other programs.

    Raises:
        ShardmillError: a file is not a result of measure.py, or was changed.
    """
    matching, stale = [], []
    for path in files:
        evidence = of_build(path, read_result(path), manifest)
        if evidence is None:
            stale.append(path.name)
        else:
            matching.append(evidence)
    return matching, stale


def contradictions(evidence: Evidence, verdicts: Sequence[Json]) -> list[Contradiction]:
    """Return operations that a device's plan and the placement rules place differently.

    Args:
        evidence: a device's evidence.
        verdicts: the build's residency/PART.json; only predictions have rules to contradict.
    """
    return [one for verdict in verdicts for one in _of_part(evidence, verdict)] if evidence.is_measured else []


def _of_part(evidence: Evidence, verdict: Json) -> Iterator[Contradiction]:
    from portable_coreml.judge.lint import diff_residency

    part, measured = verdict["part"], evidence.residency(verdict["part"])
    if verdict["evidence"] != "predicted" or not measured:
        return
    kinds = {row["output"]: row["operation"] for row in (*measured, *verdict["rows"])}
    for diff in diff_residency(verdict["rows"], measured):
        yield Contradiction(part, diff.output, kinds[diff.output], diff.predicted, diff.rules, diff.measured)
    small = [finding["rule"] for finding in verdict["findings"] if finding["rule"] == "W5"]
    chosen = [row for row in measured if row["status"] == "ane"]
    if small and chosen:
        first = chosen[0]
        yield Contradiction(part, first["output"], first["operation"], "left to the CPU", ("W5",), "prefers the engine")


def measured_verdicts(verdicts: Sequence[Json], devices: Sequence[Evidence]) -> tuple[Json, ...]:
    """Return residency part by part: a device's measurement replaces the prediction by rules."""
    return tuple(_better(verdict, devices) for verdict in verdicts)


def _better(verdict: Json, devices: Sequence[Evidence]) -> Json:
    """Return a part's verdict; if it is a prediction, with the first device's rows in their place."""
    if verdict["evidence"] == "measured":
        return verdict
    for device in devices:
        if device.is_measured and (rows := device.residency(verdict["part"])):
            small = [finding for finding in verdict["findings"] if finding["rule"] == "W5"]  # the size is a fact
            return {**verdict, "evidence": "measured", "rows": rows, "findings": small}
    return verdict
