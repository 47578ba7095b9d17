"""What it costs to run a model in a process of its own: passes in this process and in another, in turns.

usage: python benchmarks/engine_process.py build/MODEL [--passes 200]

Prints the median milliseconds of a pass by its width, in this process and in another, and the ratio.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from shardmill.imports import quiet_coremltools
from shardmill.machine import set_threads
from shardmill.runtime import engine
from shardmill.runtime.process import EngineProcess

ROUNDS = 10


def seconds(model: Any, width: int, passes: int) -> list[float]:
    """Return how long each of some passes took."""
    found = []
    for _ in range(passes):
        start = time.perf_counter()
        model.forward([0] * width, range(width), range(width))
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    """Measure both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--passes", type=int, default=200)
    args = parser.parse_args()
    apart = EngineProcess(args.build, "fp32")
    with quiet_coremltools():
        here = engine.load(args.build, "fp32")
    if apart.threads:
        set_threads(apart.threads)
    for width in here.widths:
        took: dict[str, list[float]] = {"here": [], "apart": []}
        for _ in range(ROUNDS):
            took["here"] += seconds(here, width, args.passes // ROUNDS)
            took["apart"] += seconds(apart, width, args.passes // ROUNDS)
        first, second = (1e3 * median(took[key]) for key in ("here", "apart"))
        print(f"T={width}: {first:.2f} ms here, {second:.2f} ms in another process, x {second / first:.3f}")


if __name__ == "__main__":
    main()
