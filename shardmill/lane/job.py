"""What a measurement is given, and what it gives."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.lane.kit import Kit, Unit

Floats = NDArray[np.float32]


class Refused(Exception):
    """What can't be measured here, and why."""


class WrongError(Exception):
    """A program that runs and gives what it should not; `value` holds the figures."""

    def __init__(self, text: str, value: dict[str, Any]) -> None:
        super().__init__(text)
        self.value = value


@dataclass(frozen=True)
class Found:
    """What was measured: facts, which another run gives again, and what it took, which no other run gives again."""

    value: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"
    detail: str = ""


class Job:
    """One child's work on a kit."""

    def __init__(self, kit: Kit, work: Path, task: Mapping[str, Any], tell: Callable[[str], None]) -> None:
        """Loads nothing yet.

        Args:
            kit: what is measured.
            work: folder for what is compiled.
            task: what the parent asks for: variant, unit, engine, passes.
            tell: takes the stage that begins, so that a death can be placed.
        """
        self.kit, self.work, self._tell = kit, work, tell
        self.variant = kit.variants[task["variant"]]
        self.units = kit.units(task["variant"])
        self.passes, self.native = int(task["passes"]), not task["engine"]
        self.stage_name = "beginning"
        self.loaded: dict[str, Any] = {}  # models by unit
        self._unit: str = task["unit"]

    @property
    def unit(self) -> Unit:
        """The program that this child is about."""
        return self.units[self._unit]

    def stage(self, name: str) -> None:
        """Says where the work stands."""
        self.stage_name = name
        self._tell(name)

    def package(self, unit: Unit) -> Path:
        """Where a program's package lies."""
        return self.kit.folder / str(unit.program["path"])

    def bundle(self, unit: Unit) -> Path:
        """Where it is compiled to."""
        return self.work / "compiled" / unit.variant / f"{unit.name}.mlmodelc"

    def load_unit(self, unit: Unit) -> Any:
        """A program as it was compiled."""
        return self.load(self.bundle(unit), unit.called)

    def load(self, path: Path, function: str | None) -> Any:
        """A function of a compiled program on CPU and Neural Engine, or its only one."""
        import coremltools as ct

        named = {"function_name": function} if function else {}
        return ct.models.CompiledMLModel(str(path), compute_units=ct.ComputeUnit.CPU_AND_NE, **named)

    def recorded(self, width: int, part: str) -> list[Mapping[str, Any]]:
        """What a part was fed with and gave, pass by pass, in those passes that called it."""
        passes = self.variant["recorded"][str(width)]
        return [row[part] for row in passes if part in row]

    def array(self, key: str) -> Floats:
        """A recorded array in float32; it is stored in float16 where that loses nothing."""
        stored = np.load(self.kit.folder / "arrays" / f"{key}.npy", allow_pickle=False)
        return np.asarray(stored, np.float32)

    def inputs(self, row: Mapping[str, Any]) -> dict[str, Floats]:
        """The inputs of a recorded call."""
        return {name: self.array(key) for name, key in row["inputs"].items()}


def peak_bytes() -> int:
    """Most memory that this process had resident. What the Neural Engine's own service holds is not in it."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
