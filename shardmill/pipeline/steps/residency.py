"""residency: where each operation of a part runs, measured on a Mac, predicted elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from shardmill import machine, plan
from shardmill.pipeline.steptable import ingredients
from shardmill.pipeline.store import Action, Store, read_receipt
from shardmill.pipeline.verdict import failed, settle


def run(
    part: Path, package: Path, bundle: Path, made: Path, compiled: Path, verdict: Path, receipt: Path, store: str
) -> None:
    """Writes residency/P.json (`verdict`).

    Args: part parts/P.json; package the .mlpackage and bundle the .mlmodelc, with made and compiled their receipts.
    """
    piece = plan.load_part(part)
    engine = machine.engine()
    hashes = read_receipt(made)["outputs"]["package"], read_receipt(compiled)["outputs"]["bundle"]

    def work(out: Mapping[str, Path]) -> None:
        from shardmill.gates import residency, thresholds

        rows, findings = residency.inspect(package, bundle, piece.tokens)
        gate = thresholds.compare(residency.measurements(rows, findings))
        content = {
            "part": piece.name,
            "engine": engine,
            "evidence": "predicted" if machine.is_portable() else "measured",
            "counts": Counter(row.status for row in rows),
            "gate": gate,
            "findings": findings,
            "rows": [asdict(row) for row in rows],
        }
        settle(f"residency {piece.name}", content, out["verdict"], verdict)

    failed(verdict).unlink(missing_ok=True)
    reads = {package: made, bundle: compiled}
    Store(Path(store)).perform(action(piece, *hashes), {"verdict": verdict}, receipt, work, reads, engine=engine)


def action(part: plan.Part, package: str, bundle: str) -> Action:
    """A verdict depends on the bytes that were judged, the range of T, and who judged."""
    params = {"tokens": part.tokens, "engine": machine.engine()}
    return Action("residency", {"package": package, "bundle": bundle}, params, **ingredients("residency"))
