"""Runs all measurements, group by group, each in a child process; a failure is recorded, and the other groups go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmill.lane.bisect import layer_at, search
from shardmill.lane.kit import Kit
from shardmill.lane.results import OK, Record, Results
from shardmill.lane.todo import COMPILE, FIRST, MeasurementGroup, Progress
from shardmill.lane.watch import Watch, watched

FAILED = ("refused", "crashed", "timeout")


@dataclass(frozen=True)
class RoundRun:
    """One start of measure.py.

    Attributes:
        kit: the kit to measure.
        results: the results file, with the lines of earlier runs.
        watch: how children run.
        work: folder for compiled programs.
        engine: module that takes Core ML's place, or None.
        passes: the number of passes in a median.
        groups: the requested measurements.
        soak: seconds of passes with pauses; 0 for none.
    """

    kit: Kit
    results: Results
    watch: Watch
    work: Path
    engine: str | None
    passes: int
    groups: Sequence[MeasurementGroup]
    soak: float = 0.0


def measure(run: RoundRun, progress: Progress) -> None:
    """Finish every measurement that is not finished yet."""
    for group in run.groups:
        _finish(run, group, progress)


def bisect(run: RoundRun, progress: Progress) -> None:
    """Find the failing operation in each program that can't be loaded; it may take a dozen loads that hang."""
    for group in run.groups:
        broken = [m.key for m in group.measurements if run.results.status(m.key) in FAILED]
        if any(key.endswith((f"/{COMPILE}", f"/{FIRST}")) for key in broken):
            _bisect(run, group, progress)


def _finish(run: RoundRun, group: MeasurementGroup, progress: Progress) -> None:
    """Run children until every measurement of a group has its line."""
    while todo := [m for m in group.measurements if not run.results.status(m.key)]:
        barred = {m.key: need for m in todo for need in m.needs if run.results.status(need) not in ("", OK)}
        for key, need in barred.items():
            _add(run, progress, _record(key, "not_run", {}, f"{need}: {run.results.status(need)}"))
        if barred:
            continue
        for record in watched(_patient(run), _task(run, group, [m.key for m in todo]), progress.begin):
            _add(run, progress, record)
            if record["status"] != OK and any(record["key"] in m.needs for m in todo):
                break  # the child is ended, and measurements that need this one are not tried


def _patient(run: RoundRun) -> Watch:
    """Return how to run children, so that none is ended before its passes with pauses are over."""
    return replace(run.watch, limit=run.watch.limit + run.soak)


def _bisect(run: RoundRun, group: MeasurementGroup, progress: Progress) -> None:
    """Find the first operation with which the program of a group can't be loaded."""
    unit = run.kit.units(group.variant)[group.unit]
    stem = f"{group.variant}/{group.unit}/bisect"
    if run.results.status(stem):
        return
    _ask(run, group, f"{stem}.operations", progress)
    if run.results.status(f"{stem}.operations") != OK:
        return
    found = run.results.records[f"{stem}.operations"]["value"]["operations"]
    places = [place for place, (kind, output) in enumerate(found) if output and not kind.startswith("const")]

    def fails(place: int) -> bool:
        _ask(run, group, f"{stem}#{place}", progress)
        return run.results.status(f"{stem}#{place}") != OK

    place = search(places, fails)
    probes = {key.rsplit("#", 1)[1]: r["status"] for key, r in run.results.records.items() if f"{stem}#" in key}
    if place is None:
        text = "no cut of the program fails, not even after its last operation: the cause is no single operation"
        _add(run, progress, _record(stem, "wrong", {"of": len(found), "probes": probes}, text))
        return
    kind, output = found[place]
    layer = layer_at(place, [name for _, name in found], unit.part["layers"])
    value = {"operation": kind, "output": output, "layer": layer, "place": place, "of": len(found), "probes": probes}
    where = "" if layer is None else f" in layer {layer}"
    _add(run, progress, _record(stem, OK, value, f"fails from {kind} {output}{where} on"))


def _ask(run: RoundRun, group: MeasurementGroup, key: str, progress: Progress) -> None:
    """Run one measurement in a separate child, if it has no line yet."""
    if not run.results.status(key):
        for record in watched(run.watch, _task(run, group, [key]), progress.begin):
            _add(run, progress, record)


def _task(run: RoundRun, group: MeasurementGroup, keys: Sequence[str]) -> dict[str, Any]:
    return {
        "kit": str(run.kit.folder),
        "work": str(run.work),
        "engine": run.engine,
        "variant": group.variant,
        "unit": group.unit,
        "passes": run.passes,
        "soak": run.soak,
        "keys": list(keys),
    }


def _record(key: str, status: str, value: dict[str, Any], detail: str) -> Record:
    return {"key": key, "status": status, "value": value, "timing": {}, "detail": detail}


def _add(run: RoundRun, progress: Progress, record: Record) -> None:
    run.results.add(record)
    progress.done(record)
