"""Chooses how many threads of the portable engine make the passes of a build fastest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from shardmill.machine import cores, is_portable, set_threads
from shardmill.runtime.engine import Engine

CHOSEN_BY_HAND = "OMP_NUM_THREADS"  # torch's own variable
SECONDS = 0.15  # of measuring for each number of threads, or one pass of each width if that takes longer
WARM = 3  # passes that don't count: the first is planned, and the third makes the engine's packed copies
GAIN = 0.95  # more threads must reduce the time to at most this share: other work soon makes them slower


def fastest_threads(measure: Callable[[], float]) -> None:
    """Set the number of threads with which `measure` returns the least time, unless a person or Core ML decides."""
    if is_portable() and CHOSEN_BY_HAND not in os.environ:
        set_threads(fastest(measure, cores(), set_threads))


def fastest(measure: Callable[[], float], most: int, choose: Callable[[int], None]) -> int:
    """Return the number of threads among 1, 2, 4 ... up to `most` beyond which more threads gain little."""
    best, least = 1, float("inf")
    for threads in (n for n in (1, 2, 4, 8, 16) if n <= most):
        choose(threads)
        took = measure()
        if took > GAIN * least:
            break
        best, least = threads, took
    return best


def seconds_for_passes(engine: Engine) -> float:
    """Return the time of the fastest one-token pass plus the fastest widest decode pass, without the LM head."""
    total, widths = 0.0, {1, engine.verify}
    for width in widths:
        run = partial(engine.hidden, [0] * width, range(width), range(width))
        for _ in range(WARM):
            run()
        total += min(timings(run, SECONDS / len(widths)))
    engine.reset()
    return total


def timings(run: Callable[[], object], seconds: float) -> list[float]:
    """Return the time of each call, for as many calls as fit into `seconds`, at least one."""
    times: list[float] = []
    while sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times
