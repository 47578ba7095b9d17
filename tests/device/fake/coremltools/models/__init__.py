"""Models that answer with the recorded output of the inputs that are nearest to those that they get.

FAULT in the environment is KIND:NAME. `hang`, `kill` and `refuse` befall the load of a program that has an operation
with an output of that NAME, `way` the load of any that is loaded so; `nan` and `wrong` befall what the program called
NAME gives. LOADS names a file that says of every load how it was.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import compute_plan, utils  # noqa: F401

ALONE = 3  # references to an array that only the inputs hold, while they are looked at


def fault(kind: str, names: set[str]) -> bool:
    """Whether it is asked for."""
    wanted, _, name = os.environ.get("FAULT", "").partition(":")
    return wanted == kind and name in names


class CompiledMLModel:
    """A copy of a package that is called compiled."""

    def __init__(
        self,
        path: str,
        compute_units: Any,
        function_name: str | None = None,
        optimization_hints: dict[str, Any] | None = None,
    ) -> None:
        self.unit, self.folder = Path(path).stem.partition(".")[0], Path(path)
        told = {name: value.name for name, value in (optimization_hints or {}).items()}
        self.way = f"{compute_units.name} {told or ''}".strip()
        if (self.folder / "coremldata.bin").is_file():  # the portable compiler's
            self.way = "portable"
            self.folder = next(Path(os.environ["KIT"]).glob(f"variants/*/packages/{self.unit}.mlpackage"))
        if "LOADS" in os.environ:
            with open(os.environ["LOADS"], "a") as loads:
                loads.write(f"{self.unit}: {self.way}\n")
        functions = utils.functions(self.folder)
        if fault("way", {self.way}):
            raise RuntimeError("not so")
        outputs = {out.name for op in functions[function_name or min(functions)] for out in op.outputs}
        if fault("hang", outputs):
            Path(os.environ["KIT"], "hangs").touch()  # the supervisor of the tests waits no longer
            time.sleep(3600)
        if fault("kill", outputs):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault("refuse", outputs):
            raise RuntimeError('{\n    NSLocalizedDescription = "Unable to build the MPSGraph: -14";\n}')
        kit = Path(os.environ["KIT"])
        variants = json.loads((kit / "kit.json").read_text())["variants"]
        passes = [row for variant in variants for rows in variant["recorded"].values() for row in rows]
        self.rows = [row[self.unit] for row in passes if self.unit in row]
        self.output = next((part["output"] for part in variants[0]["parts"] if part["name"] == self.unit), "")
        self.arrays = kit / "arrays"

    def make_state(self) -> object:
        """It keeps nothing."""
        return object()

    def array(self, key: str) -> Any:
        return np.load(self.arrays / f"{key}.npy").astype(np.float32)

    def predict(self, inputs: dict[str, Any], state: Any) -> dict[str, Any]:
        """What was recorded. An array that nobody else holds may crash Core ML later, which `crash` makes certain."""
        if fault("crash", {"fresh"}) and any(sys.getrefcount(value) <= ALONE for value in inputs.values()):
            os.kill(os.getpid(), signal.SIGSEGV)
        if not self.rows:
            return {}

        def distance(row: dict[str, Any]) -> float:
            found = [(self.array(key), inputs[name]) for name, key in row["inputs"].items()]
            alike = all(a.shape == b.shape for a, b in found)
            return sum(float(np.abs(a - b).sum()) for a, b in found) if alike else np.inf

        out = self.array(min(self.rows, key=distance)["fp16"])
        if fault("nan", {self.unit}):
            out[0, 0] = np.nan
        if fault("wrong", {self.unit}):
            out = np.roll(out, 1, axis=1)
        return {self.output: out}
