"""residency: where each operation of a part runs, measured on a Mac, predicted elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from shardmill import canonical, host, plan
from shardmill.steps import ingredients
from shardmill.store import Action, Store, read_receipt


def run(part: Path, package: Path, made: Path, verdict: Path, receipt: Path, store: str) -> None:
    """Args: part parts/P.json; package the .mlpackage and made its receipt; verdict residency/P.json."""
    piece = plan.load_part(part)
    engine = host.engine()
    inputs = {"package": read_receipt(made)["outputs"]["package"]}
    action = Action("residency", inputs, {"tokens": piece.tokens, "engine": engine}, **ingredients("residency"))

    def work(out: Mapping[str, Path]) -> None:
        from shardmill.gates import residency, thresholds

        rows, findings = residency.inspect(package, piece.tokens)
        gate = thresholds.judge(f"residency {piece.name}", residency.measurements(rows, findings))
        content = {
            "part": piece.name,
            "engine": engine,
            "evidence": "predicted" if host.is_portable() else "measured",
            "counts": Counter(row.status for row in rows),
            "gate": gate,
            "findings": findings,
            "rows": [asdict(row) for row in rows],
        }
        canonical.write_json(out["verdict"], content)

    Store(Path(store)).perform(action, {"verdict": verdict}, receipt, work, engine=engine)
