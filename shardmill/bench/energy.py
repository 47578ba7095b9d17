"""Measures the energy of the whole chip if the platform reports it to this process, and otherwise gives the reason.

Linux counts it in the processor (RAPL, Documentation/power/powercap/powercap.rst of the kernel); macOS reports it
through `powermetrics`. Both report it to root only. The figures include all other work of the machine.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kit_runner.job import COMMAND, counted

from shardmill.bench.server import Joules

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Meter:
    """A counter of joules, or None with the `reason`."""

    joules: Joules | None
    reason: str = ""


@contextmanager
def start_meter() -> Iterator[Meter]:
    """Yield the machine's meter."""
    if platform.system() != "Darwin":
        yield rapl(POWERCAP)
    elif os.geteuid() != 0 or shutil.which(COMMAND[0]) is None:
        yield Meter(None, "powermetrics reports energy to root only: run the same command with sudo")
    else:
        with powermetrics(COMMAND) as joules:
            yield Meter(joules)


def rapl(root: Path) -> Meter:
    """Return a meter of all processor packages under `root`."""
    packages = sorted(folder for folder in root.glob("intel-rapl:*") if folder.name.count(":") == 1)
    if not packages:
        return Meter(None, "this machine has no energy counter that the system shows (RAPL)")
    try:
        return Meter(Counters(packages))
    except PermissionError:
        return Meter(None, f"{packages[0]}/energy_uj is for root only: run the same command as root")


class Counters:
    """A counter of the joules used by the packages since its creation. The kernel's counters wrap around."""

    def __init__(self, packages: Sequence[Path]) -> None:
        self._packages = packages
        self._ranges = [_number(package / "max_energy_range_uj") for package in packages]
        self._last = self._read()
        self._sum = 0

    def __call__(self) -> float:
        """Return the joules so far."""
        now = self._read()
        for value, last, size in zip(now, self._last, self._ranges, strict=True):
            self._sum += value - last if value >= last else value - last + size
        self._last = now
        return self._sum / 1e6

    def _read(self) -> list[int]:
        return [_number(package / "energy_uj") for package in self._packages]


def _number(file: Path) -> int:
    return int(file.read_text())


@contextmanager
def powermetrics(command: Sequence[str]) -> Iterator[Joules]:
    """Sum the samples of a running `command`."""
    with counted(command) as millijoules:
        yield lambda: millijoules() / 1e3
