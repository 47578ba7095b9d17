"""What the statements of a build must say to be whole: every subject, every gate, numbers within today's thresholds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardmill.attest.statement import read_provenance
from shardmill.errors import ShardmillError
from shardmill.files import read_json
from shardmill.gates.thresholds import Threshold, of
from shardmill.pipeline.audit import ATTESTATION, RESULTS
from shardmill.pipeline.provenance import gate_statements, verdicts
from shardmill.pipeline.subjects import subjects
from shardmill.release.differences import steps_of
from shardmill.runtime.manifest import COMPLETE, read_manifest

NO_VERDICT = (LookupError, TypeError, ValueError, AttributeError, ShardmillError)  # raised by what is none


def missing_subjects(build: Path) -> Iterator[str]:
    """Names of files that provenance.json should speak of, by model.json and the receipts, and does not."""
    statement = read_provenance(build / ATTESTATION)
    said = {(row["name"], row["digest"]["sha256"]) for row in statement["subject"]}
    model = read_manifest(build, COMPLETE)
    for name, sha in (*subjects(model, build / "model.json"), *verdicts(steps_of(statement))):
        if (name, sha) not in said:
            yield f"{name} is no subject of it"


def missing_statements(build: Path) -> Iterator[str]:
    """Gates of which test-results.jsonl does not say what their verdicts do."""
    lines = (build / RESULTS).read_text(encoding="utf-8").splitlines() if (build / RESULTS).is_file() else []
    for path in _paths(build):
        try:
            expected = [json.dumps(row, sort_keys=True, ensure_ascii=False) for row in gate_statements(build, [path])]
        except NO_VERDICT:
            expected = []
        if not expected or expected[0] not in lines:
            yield f"does not say what {path.relative_to(build).as_posix()} does"


def verdict_faults(build: Path) -> tuple[int, int, list[tuple[str, str]]]:
    """Gates, numbers, and each number that this shardmill would not let pass, whatever the verdict says."""
    gates, numbers, faults = 0, 0, []
    for path in _paths(build):
        name = path.relative_to(build).as_posix()
        try:
            content = read_json(path)
            rows, known = content["gate"], of(content)
            if not rows:
                faults.append((name, "a verdict without a number"))
            faults += [(name, fault) for fault in (_fault(row, known) for row in rows) if fault]
        except NO_VERDICT:
            rows, faults = [], [*faults, (name, "no verdict of a gate")]
        gates, numbers = gates + 1, numbers + len(rows)
    if not gates:
        faults.append((ATTESTATION, "names no verdict of any gate"))
    return gates, numbers, faults


def _fault(row: Mapping[str, Any], thresholds: Mapping[str, Threshold]) -> str:
    threshold, value = thresholds.get(str(row.get("name"))), row.get("value")
    if threshold is None:
        return f"{row.get('name')} is no number that this shardmill knows"
    if "limit_why" in row:  # the model's own limit, which is stricter than the table's or counts for nothing
        threshold = replace(threshold, limit=min(threshold.limit, _stated(row)))
    if not isinstance(value, int | float) or not math.isfinite(value) or not threshold.holds(value):
        return f"{row['name']} is {value}, must be {'>=' if threshold.at_least else '<='} {threshold.limit:g}"
    return "" if row.get("passed") is True else f"{row['name']} did not pass"


def _stated(row: Mapping[str, Any]) -> float:
    """Return the limit that a row names; if it names none, one that lets nothing pass."""
    try:
        return float(str(row["threshold"]).split()[-1])
    except (KeyError, IndexError, ValueError):
        return -math.inf


def _paths(build: Path) -> list[Path]:
    return [build / name for name, _ in sorted(verdicts(steps_of(read_provenance(build / ATTESTATION))))]
