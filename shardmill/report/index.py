"""One page about all models of a batch: each model's result, from its build's files, and a link to its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.errors import UnreadableError
from shardmill.files import read_json, write_text
from shardmill.report.page import environment
from shardmill.report.stages import RECEIPT

PAGE = "index.html"  # in the folder of builds
NOT_RUN, NOT_FINISHED = "not run", "not finished"


@dataclass(frozen=True)
class BuildRow:
    """A model of a batch, or a config that was refused."""

    name: str  # for a refused config, the name of its file
    error: str = ""  # why the model was not built, in one line; empty for a finished build
    kind: str = ""  # "decoder" or "encoder"
    passed: int = 0  # number of gate numbers that hold
    gates: int = 0  # number of all gate numbers
    programs: int = 0
    bytes: int = 0  # of the programs' packages
    pass_ms: float | None = None  # the narrowest pass of the benchmark
    machine: str = ""  # the machine and engine of the benchmark; NOT_RUN if the config leaves out the benchmark


def write_index(builds: Path, rows: Sequence[BuildRow]) -> None:
    """Write the page."""
    failed = [row for row in rows if row.error]
    shown = {"rows": [row for row in rows if not row.error], "failed": failed, "count": len(rows)}
    write_text(builds / PAGE, environment().get_template(PAGE).render(shown))


def read_row(build: Path, failed: str) -> BuildRow:
    """Return the row of a build, read from its files.

    Args:
        build: the model's folder.
        failed: the reason, from a job's log, why the build may not be finished; empty if no log gives one.
    """
    try:
        if not (build / "report.html").is_file():
            return BuildRow(build.name, failed or NOT_FINISHED)
        plan, page = read_json(build / "plan.json"), read_json(build / "report.receipt.json")
        speed = read_json(build / "benchmark/speed.json") if "speed" in page["outputs"] else None
        numbers = [number["passed"] for verdict in _verdicts(build) for number in verdict["gate"]]
        passes: Mapping[str, float] = (speed or {}).get("pass_seconds") or {}
        return BuildRow(
            name=build.name,
            kind=plan["kind"],
            passed=sum(numbers),
            gates=len(numbers),
            programs=len(plan["parts"]) - 1,  # the embedding is a table
            bytes=sum(file.stat().st_size for file in build.glob("packages/*.mlpackage/**/*") if file.is_file()),
            pass_ms=1000 * min(passes.values()) if passes else None,
            machine=f"{speed['machine']['processor']}, {speed['engine']['name']}" if speed is not None else NOT_RUN,
        )
    except (UnreadableError, LookupError, TypeError, AttributeError) as error:
        return BuildRow(build.name, failed or f"its files can't be read: {error}")


def _verdicts(build: Path) -> Iterator[Any]:
    """Yield the verdicts of every gate: the results whose receipts call them so."""
    for receipt in sorted(build.glob(f"*/*{RECEIPT}")):
        if "verdict" in read_json(receipt)["outputs"]:
            yield read_json(receipt.with_name(receipt.name.replace(RECEIPT, ".json")))
