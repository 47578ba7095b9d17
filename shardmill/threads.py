"""How many threads suit a model on the portable engine: small ones lose by sharing their work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardmill.engine import Engine
from shardmill.host import is_portable, load_programs_as, set_threads
from shardmill.quiet import quiet_coremltools

CHOSEN_BY_HAND = "OMP_NUM_THREADS"  # torch's own variable
PASSES, TRIES = 2, 3


def choose_threads(engine: Engine) -> None:
    """Sets the number with which the engine's last part of layers is quickest, unless a person or Core ML decides."""
    if is_portable() and CHOSEN_BY_HAND not in os.environ:
        set_threads(fastest(lambda: seconds_for_passes(engine), os.cpu_count() or 1, set_threads))


def fastest_threads(build: Path, manifest: Mapping[str, Any], precision: str) -> int:
    """The same for a build that this process has not loaded; loads its smallest part of layers."""
    layers = [part for part in manifest["parts"] if part["kind"] == "layers"]
    smallest = min(layers, key=lambda part: part["end"] - part["start"])
    with quiet_coremltools(), load_programs_as(precision):
        engine = Engine({**manifest, "parts": [smallest]}, build)
    return fastest(lambda: seconds_for_passes(engine), os.cpu_count() or 1, set_threads)


def fastest(measure: Callable[[], float], most: int, choose: Callable[[int], None]) -> int:
    """Of 1, 2, 4 ... up to `most` the number after which more give nothing; the best of several tries each."""
    best, least = 1, float("inf")
    for threads in (n for n in (1, 2, 4, 8, 16) if n <= most):
        choose(threads)
        took = min(measure() for _ in range(TRIES))
        if took >= least:
            break
        best, least = threads, took
    return best


def seconds_for_passes(engine: Engine) -> float:
    """Time of a few one-token passes through the last part of layers, after one that plans it."""
    x = engine.table[:1].astype("float32").T[None, :, :, None]  # [1, d, 1, 1]
    inputs = {"x": x, **engine.shared_inputs([0], [0])}
    engine.layers[-1](inputs)
    start = time.perf_counter()
    for _ in range(PASSES):
        engine.layers[-1](inputs)
    took = time.perf_counter() - start
    engine.reset()
    return took
