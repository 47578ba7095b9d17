"""Which operation a program can't be loaded with: it is cut off after one operation, and loaded, again and again.

A cut program fails if the first pass of any width fails. The search takes it that a program which fails does so with
all that comes after it too, so some twelve loads find one of thousands of operations. Where even the first operation
fails, it may be the cut that is refused and not the operation: all probes are in the result, so that this shows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from shardmill.lane.cut import cut_after, operations
from shardmill.lane.job import Found, Job
from shardmill.lane.measurements import load_and_run

Layers = Sequence[Sequence[object]]  # [name of its first operation's output, layer], in order


def cut_and_load(job: Job, place: int) -> Found:
    """Loads and runs the program cut off after the operation at `place`."""
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


def list_operations(job: Job, _: int) -> Found:
    """Type and first output of each operation; the process that searches loads nothing, not even coremltools."""
    found = operations(job.package(job.unit), job.unit.program["function"])
    return Found(value={"operations": [list(pair) for pair in found]})


def search(places: Sequence[int], fails: Callable[[int], bool]) -> int:
    """The first of the places at which a program fails that fails as a whole; found by halves."""
    low, high = 0, len(places) - 1
    while low < high:
        middle = (low + high) // 2
        if fails(places[middle]):
            high = middle
        else:
            low = middle + 1
    return places[low]


def layer_at(place: int, names: Sequence[str], layers: Layers) -> int | None:
    """The layer that the operation at `place` belongs to, given each operation's output and where layers begin."""
    begins = {str(name): layer for name, layer in layers}
    found = None
    for name in names[: place + 1]:
        found = begins.get(name, found)
    return found if isinstance(found, int) else None
