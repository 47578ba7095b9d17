"""How many threads suit a model on the portable engine: small ones lose by sharing their work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from shardmill.machine import cores, is_portable, set_threads
from shardmill.runtime.engine import Engine

CHOSEN_BY_HAND = "OMP_NUM_THREADS"  # torch's own variable
SECONDS = 0.15  # that measuring takes for each number of threads, or one pass of each width where that is longer
GAIN = 0.95  # share of the time that more threads must take at most: other work soon makes them the slower


def choose_threads(engine: Engine) -> None:
    """Sets the number with which the engine is quickest, unless a person or Core ML decides."""
    fastest_threads(lambda: _seconds_for_passes(engine))


def fastest_threads(measure: Callable[[], float]) -> None:
    """Sets the number with which something takes least time, unless a person or Core ML decides."""
    if is_portable() and CHOSEN_BY_HAND not in os.environ:
        set_threads(fastest(measure, cores(), set_threads))


def fastest(measure: Callable[[], float], most: int, choose: Callable[[int], None]) -> int:
    """Of 1, 2, 4 ... up to `most` the number after which more gain little."""
    best, least = 1, float("inf")
    for threads in (n for n in (1, 2, 4, 8, 16) if n <= most):
        choose(threads)
        took = measure()
        if took > GAIN * least:
            break
        best, least = threads, took
    return best


def _seconds_for_passes(engine: Engine) -> float:
    """The quickest one-token pass and the quickest widest one of decoding together, without the head."""
    total, widths = 0.0, {1, engine.verify}
    for width in widths:
        run = partial(engine.hidden, [0] * width, range(width), range(width))
        run()  # plans it
        total += min(timings(run, SECONDS / len(widths)))
    engine.reset()
    return total


def timings(run: Callable[[], object], seconds: float) -> list[float]:
    """How long each call took, of as many as fit in that time and at least one."""
    found: list[float] = []
    while sum(found) < seconds:
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found
