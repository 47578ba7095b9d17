"""residency: where each operation of a part runs, measured on a Mac, predicted elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardmill import machine, plan
from shardmill.pipeline.task import Action, Artifact, Task, Tools
from shardmill.pipeline.verdict import write_verdict


def task(
    part: Path,
    package: Artifact,
    bundle: Artifact,
    engine: Mapping[str, str],
    tools: Tools,
    systems: Sequence[str] = (),
    limits: Sequence[Mapping[str, Any]] = (),
) -> Task:
    """Describe a verdict: the judged bytes, the range of T, the engine, named systems and their limits decide it."""
    piece = plan.load_part(part)

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.gates import measurement, residency

        named, encodes = piece.spec.calls.by_name, piece.spec.encodes
        tokens = piece.spec.tokens
        rows, findings = residency.inspect_placement(package.path, bundle.path, tokens, encodes, named, systems)
        gate = measurement.compare(residency.placement_measurements(rows, findings))
        content = {
            "part": piece.name,
            "engine": engine,
            "evidence": "predicted" if machine.is_portable() else "measured",
            "counts": Counter(row.status for row in rows),
            "gate": gate,
            "findings": findings,
            "rows": [asdict(row) for row in rows],
        }
        write_verdict(f"residency {piece.name}", content, made["verdict"])

    inputs = {"package": package.sha256, "bundle": bundle.sha256}
    params = {"tokens": piece.spec.tokens, "engine": engine, "systems": list(systems)}
    params |= {"limits": [*limits]} if limits else {}
    return Task(work, Action("residency", inputs, params, **tools), {"engine": engine})
