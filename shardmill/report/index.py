"""One page over the models of a batch: what became of each, by the files of its build, and where its own page is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.errors import UnreadableError
from shardmill.files import read_json, write_text
from shardmill.report.page import environment

PAGE = "index.html"  # in the folder of builds
NOT_RUN, NOT_FINISHED = "not run", "not finished"


@dataclass(frozen=True)
class BuildRow:
    """A model, or a config that is none.

    Attributes:
        name: the model's; of a config that was refused, its file.
        error: what kept it from being built, in one line; empty for one that is finished.
        kind: "decoder" or "encoder".
        passed, gates: gate numbers that hold, and all.
        programs, bytes: how many programs there are, and what their packages take.
        pass_ms: milliseconds of the narrowest pass on the machine that measured.
        machine: that machine and its engine, NOT_RUN where the config leaves out the benchmark.
    """

    name: str
    error: str = ""
    kind: str = ""
    passed: int = 0
    gates: int = 0
    programs: int = 0
    bytes: int = 0
    pass_ms: float | None = None
    machine: str = ""


def write_index(builds: Path, rows: Sequence[BuildRow]) -> None:
    """Write the page."""
    failed = [row for row in rows if row.error]
    shown = {"rows": [row for row in rows if not row.error], "failed": failed, "count": len(rows)}
    write_text(builds / PAGE, environment().get_template(PAGE).render(shown))


def read_row(build: Path, failed: str) -> BuildRow:
    """Return the row of a build, read from its files.

    Args:
        build: the model's folder.
        failed: why there may be no finished build, by the log of a job; empty if no log tells.
    """
    try:
        if not (build / "report.html").is_file():
            return BuildRow(build.name, failed or NOT_FINISHED)
        plan, page = read_json(build / "plan.json"), read_json(build / "report.receipt.json")
        speed = read_json(build / "benchmark/speed.json") if "speed" in page["outputs"] else None
        verdicts = [read_json(file) for folder in ("parity", "residency") for file in _verdicts(build / folder)]
        numbers = [number["passed"] for verdict in verdicts for number in verdict["gate"]]
        passes: Mapping[str, float] = (speed or {}).get("pass_seconds") or {}
        return BuildRow(
            name=build.name,
            kind=plan["kind"],
            passed=sum(numbers),
            gates=len(numbers),
            programs=len(plan["parts"]) - 1,  # the embedding is a table
            bytes=sum(_sizes(build.glob("packages/*.mlpackage"))),
            pass_ms=1000 * min(passes.values()) if passes else None,
            machine=f"{speed['machine']['processor']}, {speed['engine']['name']}" if speed is not None else NOT_RUN,
        )
    except (UnreadableError, LookupError, TypeError, AttributeError) as error:
        return BuildRow(build.name, failed or f"its files can't be read: {error}")


def _verdicts(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.json") if not file.name.endswith((".receipt.json", ".failed.json")))


def _sizes(folders: Iterable[Path]) -> Iterable[int]:
    return (file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
