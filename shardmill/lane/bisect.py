"""Finds the operation with which a program can't be loaded: cuts the program after an operation, and loads it.

A cut program fails if the first pass of any width fails. The search assumes that every longer cut fails too, so some
twelve loads find one of thousands of operations. If even the first operation fails, the cause may be the cut and not
the operation: the result contains all probes, so that this shows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from shardmill.lane.cut import cut_after, operations
from shardmill.lane.job import Found, MeasurementJob
from shardmill.lane.measurements import load_and_run

Layers = Sequence[Sequence[object]]  # [name of the layer's first output, layer], in order


def cut_and_load(job: MeasurementJob, place: int) -> Found:
    """Load and run the program, cut after the operation at `place`."""
    import coremltools as ct

    with tempfile.TemporaryDirectory() as folder:
        job.stage(f"cut after operation {place}")
        package = Path(folder) / "cut.mlpackage"
        cut_after(job.package(job.unit), package, place, job.unit.program["function"])
        job.stage("compilation of the cut program")
        bundle = Path(ct.models.utils.compile_model(str(package), str(Path(folder) / "cut.mlmodelc")))
        timing = load_and_run(job, bundle, None)
    kind, output = operations(job.package(job.unit), job.unit.program["function"])[place]
    return Found(value={"operation": kind, "output": output}, timing=timing)


def list_operations(job: MeasurementJob, _: int) -> Found:
    """Return type and first output of each operation; the searching process loads nothing, not even coremltools."""
    found = operations(job.package(job.unit), job.unit.program["function"])
    return Found(value={"operations": [list(pair) for pair in found]})


def search(places: Sequence[int], fails: Callable[[int], bool]) -> int | None:
    """Return the first of the places at which a failing program fails, by binary search; None if no cut fails."""
    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        if fails(places[middle]):
            high = middle
        else:
            low = middle + 1
    return places[low] if low < len(places) else None


def layer_at(place: int, names: Sequence[str], layers: Layers) -> int | None:
    """Return the layer of the operation at `place`, given all operations' outputs and each layer's first output."""
    begins = {str(name): layer for name, layer in layers}
    found = None
    for name in names[: place + 1]:
        found = begins.get(name, found)
    return found if isinstance(found, int) else None
