"""Runs all measurements, group by group, each in a child process; a failure is recorded, and the other groups go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit_runner.kit import ASKED, OK, Kit, Record, Results
from kit_runner.plan import COMPILE, FIRST, MeasurementGroup, seconds_left
from kit_runner.questions import SECONDS
from kit_runner.supervisor import supervise

FAILED = ("refused", "crashed", "timeout")
SHOWN = ("load_seconds", "plan_seconds", "ms", "psnr", "width_error_fp16", "margin")  # figures to print, if present


@dataclass(frozen=True)
class KitRun:
    """One start of measure.py.

    Attributes:
        kit: the kit to measure.
        results: the results file, with the lines of earlier runs.
        script: measure.py.
        out: folder for compiled programs and the children's output.
        groups: the requested measurements.
        engine: module that takes Core ML's place, or None.
        passes: the number of passes in a median.
        timeout: seconds that one measurement may take.
        soak: seconds of passes with pauses; 0 for none.
    """

    kit: Kit
    results: Results
    script: Path
    out: Path
    groups: Sequence[MeasurementGroup]
    engine: str | None
    passes: int
    timeout: float
    soak: float


def measure(run: KitRun) -> None:
    """Finish every measurement that is not finished yet."""
    if run.results.records:
        print(f"going on: {len(run.results.records)} measurements are there already", flush=True)
    start = time.monotonic()
    for group in run.groups:
        if group.variant == ASKED and time.monotonic() - start > SECONDS:
            _put_off(run, group)
        else:
            _finish(run, group)


def _put_off(run: KitRun, group: MeasurementGroup) -> None:
    """Leave a question to the next run, which tries again whatever was not run."""
    for m in group.measurements:
        if not run.results.status(m.key):
            _add(run, _record(m.key, "not_run", {}, f"{SECONDS / 60:.0f} minutes of questions are over"))


def bisect(run: KitRun) -> None:
    """Find the failing operation in each program that can't be loaded; it may take a dozen loads that hang."""
    for group in run.groups:
        broken = [m.key for m in group.measurements if run.results.status(m.key) in FAILED]
        if any(key.endswith((f"/{COMPILE}", f"/{FIRST}")) for key in broken):
            _bisect(run, group)


def _finish(run: KitRun, group: MeasurementGroup) -> None:
    """Run children until every measurement of a group has its line."""
    while todo := [m for m in group.measurements if not run.results.status(m.key)]:
        barred = {m.key: need for m in todo for need in m.needs if run.results.status(need) not in ("", OK)}
        for key, need in barred.items():
            _add(run, _record(key, "not_run", {}, f"{need}: {run.results.status(need)}"))
        if barred:
            continue
        # No child is ended before its passes with pauses are over.
        for record in _run_child(run, group, [m.key for m in todo], run.timeout + run.soak):
            _add(run, record)
            if record["status"] != OK and any(record["key"] in m.needs for m in todo):
                break  # the child is ended, and measurements that need this one are not tried


def _bisect(run: KitRun, group: MeasurementGroup) -> None:
    """Find the first operation with which the program of a group can't be loaded."""
    unit = run.kit.units(group.variant)[group.unit]
    stem = f"{group.variant}/{group.unit}/bisect"
    if run.results.status(stem) or not _succeeds(run, group, f"{stem}.operations"):
        return
    ops = run.results.records[f"{stem}.operations"]["value"]["operations"]
    places = [place for place, (kind, output) in enumerate(ops) if output and not kind.startswith("const")]
    place = search(places, lambda place: not _succeeds(run, group, f"{stem}#{place}"))
    probes = {key.rsplit("#", 1)[1]: r["status"] for key, r in run.results.records.items() if f"{stem}#" in key}
    if place is None:
        text = "no cut of the program fails, not even after its last operation: the cause is no single operation"
        _add(run, _record(stem, "wrong", {"of": len(ops), "probes": probes}, text))
        return
    kind, output = ops[place]
    layer = layer_at(place, [name for _, name in ops], unit.part["layers"])
    value = {"operation": kind, "output": output, "layer": layer, "place": place, "of": len(ops), "probes": probes}
    where = "" if layer is None else f" in layer {layer}"
    _add(run, _record(stem, OK, value, f"fails from {kind} {output}{where} on"))


def search(places: Sequence[int], fails: Callable[[int], bool]) -> int | None:
    """Return the first place after which a cut program fails, by binary search; None if no cut fails.

    The search assumes that every longer cut fails too, so some twelve loads find one of thousands of operations. If
    even the first operation fails, the cause may be the cut and not the operation: the result contains all probes, so
    that this shows.
    """
    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        if fails(places[middle]):
            high = middle
        else:
            low = middle + 1
    return places[low] if low < len(places) else None


def layer_at(place: int, names: Sequence[str], layers: Iterable[tuple[str, int]]) -> int | None:
    """Return the layer of the operation at `place`; None in front of the first layer.

    Args:
        place: the operation's index.
        names: the first output of every operation.
        layers: (name of a layer's first output, layer) pairs.
    """
    begins = dict(layers)
    return next((begins[name] for name in reversed(names[: place + 1]) if name in begins), None)


def _succeeds(run: KitRun, group: MeasurementGroup, key: str) -> bool:
    """Run one measurement in a separate child, if it has no line yet; return whether it succeeded."""
    if not run.results.status(key):
        for record in _run_child(run, group, [key], run.timeout):
            _add(run, record)
    return run.results.status(key) == OK


def _run_child(run: KitRun, group: MeasurementGroup, keys: Sequence[str], limit: float) -> Iterator[Record]:
    task = {
        "kit": str(run.kit.folder),
        "work": str(run.out / "work"),
        "engine": run.engine,
        "variant": group.variant,
        "unit": group.unit,
        "passes": run.passes,
        "soak": run.soak,
        "keys": list(keys),
    }
    return supervise(
        run.script, task, run.out / "log.txt", limit, lambda key: print(f"{_place(run)} {key} ...", flush=True)
    )


def _record(key: str, status: str, value: dict[str, Any], detail: str) -> Record:
    return {"key": key, "status": status, "value": value, "timing": {}, "detail": detail}


def _add(run: KitRun, record: Record) -> None:
    """Write a record to the results file, and print it with an estimate of the time left."""
    run.results.add(record)
    timing, figures = record["timing"], {**record["value"], **record["timing"]}
    words = [record["status"], f"{timing['seconds']:.1f} s" if "seconds" in timing else ""]
    words += [f"{name} {figures[name]:.4g}" for name in SHOWN if figures.get(name) is not None]
    words += [record["detail"], _left(run)]
    print(f"{_place(run)} {record['key']}: {', '.join(word for word in words if word)}", flush=True)


def _place(run: KitRun) -> str:
    every = [m.key for group in run.groups for m in group.measurements]
    return f"[{sum(key in run.results.records for key in every)}/{len(every)}]"


def _left(run: KitRun) -> str:
    every = [m for group in run.groups for m in group.measurements]
    todo = [m for m in every if m.key not in run.results.records]
    seconds = seconds_left(todo, run.results.records, every)
    if not seconds:
        return ""
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
