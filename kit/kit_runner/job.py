"""The input and the result of a measurement."""

from __future__ import annotations

import os
import plistlib
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit_runner.kit import ASKED, CPU, UNHINTED, Kit, Unit

Floats = NDArray[np.float32]
WARM = 3  # passes before the measured ones


class Refused(Exception):
    """A measurement that can't be made here, with the reason."""


class WrongError(Exception):
    """A program that runs with a wrong result; `value` contains the figures."""

    def __init__(self, text: str, value: dict[str, Any]) -> None:
        super().__init__(text)
        self.value = value


@dataclass(frozen=True)
class Measured:
    """A measurement's result: facts, which another run reproduces, and timings, which no other run reproduces."""

    value: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)


class MeasurementJob:
    """One child's work on a kit."""

    def __init__(self, kit: Kit, work: Path, task: Mapping[str, Any], tell: Callable[[str], None]) -> None:
        """Store the arguments; models are loaded on first use.

        Args:
            kit: the kit to measure.
            work: folder for compiled programs.
            task: the parent's task: variant, unit, engine, passes, soak.
            tell: called with each stage that begins, so that a crash can be attributed to it.
        """
        self.kit, self.work, self._tell = kit, work, tell
        asks = task["variant"] == ASKED
        self.variant = {} if asks else kit.variants[task["variant"]]
        self.units = {} if asks else kit.units(task["variant"])
        self.passes, self.native = int(task["passes"]), not task["engine"]
        self.soak = float(task.get("soak", 0))
        self.stage_name = "beginning"
        self.loaded: dict[tuple[str, str], Any] = {}  # models by unit and way
        self._buffers: dict[tuple[int, str, tuple[int, ...]], Floats] = {}
        self._unit: str = task["unit"]

    @property
    def unit(self) -> Unit:
        """Return the program that this child measures."""
        return self.units[self._unit]

    @property
    def question(self) -> Mapping[str, Any]:
        """Return the question that this child's probes answer."""
        return next(one for one in self.kit.questions if one["name"] == self._unit)

    def stage(self, name: str) -> None:
        """Report the stage that begins."""
        self.stage_name = name
        self._tell(name)

    def package(self, unit: Unit) -> Path:
        """Return the path of a program's package."""
        return self.kit.folder / str(unit.program["path"])

    def bundle(self, unit: Unit) -> Path:
        """Return the path of a program's compiled bundle."""
        return self.work / "compiled" / unit.variant / f"{unit.name}.mlmodelc"

    def load_unit(self, unit: Unit, way: str = "") -> Any:
        """Return a program as it was compiled; it stays loaded."""
        if (unit.name, way) not in self.loaded:
            self.stage(f"load of {unit.name}")
            self.loaded[unit.name, way] = self.load(self.bundle(unit), unit, unit.called, way)
        return self.loaded[unit.name, way]

    def load(self, path: Path, unit: Unit, function: str | None, way: str = "") -> Any:
        """Load a function of a compiled program on CPU and Neural Engine, with its build's hint.

        Args:
            path: the bundle.
            unit: the program in the bundle.
            function: its name in the bundle; None for the only one.
            way: UNHINTED for no hint, CPU for the CPU alone.
        """
        import coremltools as ct

        units = ct.ComputeUnit.CPU_ONLY if way == CPU else ct.ComputeUnit.CPU_AND_NE
        named: dict[str, Any] = {"function_name": function} if function else {}
        frequency = unit.program.get("reshape_frequency")
        if frequency and way != UNHINTED:
            named["optimization_hints"] = {"reshapeFrequency": ct.ReshapeFrequency[frequency.capitalize()]}
        return ct.models.CompiledMLModel(str(path), compute_units=units, **named)

    def predict(self, model: Any, inputs: Mapping[str, Floats], state: Any) -> Any:
        """Run a pass whose inputs are copied to arrays that exist as long as this process, and return the outputs.

        Core ML keeps input arrays for about a second after a pass, and then releases them without Python's lock. If
        that is the last reference, the process may crash, whatever it is doing (coremltools pull requests 2827 and
        2829).
        """
        arrays = {name: self._buffer(model, name, array.shape) for name, array in inputs.items()}
        for name, array in inputs.items():
            np.copyto(arrays[name], array)
        return model.predict(arrays, state=state)

    def _buffer(self, model: Any, name: str, shape: tuple[int, ...]) -> Floats:
        return self._buffers.setdefault((id(model), name, shape), np.empty(shape, np.float32))

    def recorded(self, width: int, part: str) -> list[Mapping[str, Any]]:
        """Return a part's recorded inputs and outputs for the passes that called it."""
        passes = self.variant["recorded"][str(width)]
        return [row[part] for row in passes if part in row]

    def called(self, width: int) -> list[Unit]:
        """Return the units that the recorded passes of a width call; a drafter's are never called."""
        names = {name for row in self.variant["recorded"][str(width)] for name in row}
        return [unit for unit in self.units.values() if width in unit.program["widths"] and unit.part["name"] in names]

    def array(self, key: str) -> Floats:
        """Return a recorded array in float32; it is stored in float16 if that is lossless."""
        stored = np.load(self.kit.folder / "arrays" / f"{key}.npy", allow_pickle=False)
        return np.asarray(stored, np.float32)

    def inputs(self, row: Mapping[str, Any]) -> dict[str, Floats]:
        """Return the inputs of a recorded call."""
        return {name: self.array(key) for name, key in row["inputs"].items()}


def peak_bytes() -> int:
    """Return the peak resident memory of this process, without the memory of the Neural Engine's own service."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def timed(call: Callable[[], Any], passes: int) -> dict[str, Any]:
    """Return the median and the least milliseconds of a call."""
    for _ in range(WARM):
        call()
    taken = []
    for _ in range(passes):
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return {"ms": median(taken), "ms_least": min(taken), "passes": passes}


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
