"""The end of a batch: the page over all models, and a line for each that was not built."""

from __future__ import annotations

import sys
from collections.abc import Iterable
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
    # Slow to import, and only needed here.
    from shardmill.report.index import NOT_FINISHED, PAGE, Row, read_row, write_index

    broken = _broken(workflow)
    rows = []
    for model in sorted(batch.models):
        failed = _why(broken[model]) or NOT_FINISHED if model in broken else ""
        rows.append(Row(model, failed) if failed else read_row(BUILDS / model, _why(_logs(BUILDS / model))))
    rows += [Row(file, line.removeprefix(f"{file}: ")) for file, line in sorted(batch.refused.items())]
    write_index(BUILDS, rows)
    for row in rows:
        if row.error not in ("", NOT_FINISHED):
            print(f"shardmill: not built: {row.name}: {row.error}", file=sys.stderr)
    finished = sum(not row.error for row in rows)
    print(f"shardmill: {finished} of {len(rows)} models are finished, see {BUILDS / PAGE}", file=sys.stderr)


def _broken(workflow: Any) -> dict[str, list[Path]]:
    """Return the logs of the jobs that this run was to do and has not done, by model.

    What lies in such a model's folder may be left from a run before: a page, say, though a measurement failed now.
    """
    found: dict[str, list[Path]] = {}
    for job in workflow.dag.needrun_jobs():
        if "model" in job.wildcards_dict:
            found.setdefault(job.wildcards_dict["model"], []).extend(map(Path, job.log))
    return found


def _logs(build: Path) -> Iterable[Path]:
    return (build / "logs").glob("*.log")


def _why(logs: Iterable[Path]) -> str:
    """Return what the log of a job that failed says, the latest of several; empty where none did."""
    there = [log for log in logs if log.is_file()]
    for log in sorted(there, key=lambda log: log.stat().st_mtime, reverse=True):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        if said:
            return printable(f"{log.stem}: {said[-1]}", LIMIT)
    return ""
