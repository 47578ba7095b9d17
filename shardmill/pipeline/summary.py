"""The end of a batch: the page over all models, and a line for each that was not built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from shardmill.pipeline import storage
from shardmill.pipeline.batch import Batch
from shardmill.printable import printable

BUILDS = Path("build")
ERROR = "ERROR "  # how a job's log begins the line that says why it failed
LIMIT = 400  # characters of such a line


def sum_up(batch: Batch, workflow: Any) -> None:
    """Writes build/index.html and names what was not built, if this is a batch and its files lie in build/."""
    if not batch.listed or storage.is_used(workflow):
        return
    from shardmill.report.index import PAGE, Row, read_row, write_index  # slow to import, and only needed here

    failed = {model: _why(BUILDS / model) for model in batch.models}
    rows = [read_row(BUILDS / model, failed[model] or "not finished") for model in sorted(batch.models)]
    rows += [Row(file, line.removeprefix(f"{file}: ")) for file, line in sorted(batch.refused.items())]
    write_index(BUILDS, rows)
    for row in rows:
        if row.error and failed.get(row.name, row.error):
            print(f"shardmill: not built: {row.name}: {row.error}", file=sys.stderr)
    finished = sum(not row.error for row in rows)
    print(f"shardmill: {finished} of {len(rows)} models are finished, see {BUILDS / PAGE}", file=sys.stderr)


def _why(build: Path) -> str:
    """What the log of a job that failed says, the latest of several; empty where none did."""
    logs = sorted((build / "logs").glob("*.log"), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        if said:
            return printable(f"{log.stem}: {said[-1]}", LIMIT)
    return ""
