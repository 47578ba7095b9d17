"""Energy of the whole chip, from macOS's powermetrics, which only root may run."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shardmill.lane.job import Refused

COMMAND = ("powermetrics", "--samplers", "cpu_power,gpu_power,ane_power", "-i", "100", "-f", "plist")
CONSUMERS = ("cpu_energy", "gpu_energy", "ane_energy")  # millijoules in one sample
ROOT_ONLY = f"powermetrics is for root only: sudo {sys.executable} measure.py, which keeps finished measurements"


@contextmanager
def meter(command: Sequence[str] = COMMAND) -> Iterator[Callable[[], float]]:
    """Count millijoules. Raises Refused if this process may not run powermetrics."""
    if os.geteuid() != 0 or shutil.which(command[0]) is None:
        raise Refused(ROOT_ONLY)
    with counted(command) as millijoules:
        yield millijoules


@contextmanager
def counted(command: Sequence[str]) -> Iterator[Callable[[], float]]:
    """Sum the energy in the samples of a running `command`: property lists, each followed by a zero byte.

    The sum is exact to one sample.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    sums = [0.0]

    def listen() -> None:
        assert process.stdout is not None
        pending = b""
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            *samples, pending = (pending + chunk).split(b"\0")
            sums[0] += sum(_millijoules(sample) for sample in samples)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield lambda: sums[0]
    finally:
        process.terminate()
        process.wait()
        listener.join()


def _millijoules(sample: bytes) -> float:
    """Return the energy in one property list: processor, GPU and Neural Engine together."""
    processor = plistlib.loads(sample.strip())["processor"]
    return float(sum(processor[consumer] for consumer in CONSUMERS))
