"""One loaded Core ML program with its state, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.models.host import Floats
from shardmill.runtime.loading import begins


class Program:
    """A compiled bundle or a package."""

    def __init__(self, path: Path, stateful: bool, compute_units: str = "CPU_AND_NE") -> None:
        """Loads it. Raises ShardmillError where Core ML can't."""
        import coremltools as ct

        self.name, self.path = path.stem, path
        begins(self.name)
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # for who wants to watch it run
        try:
            load = ct.models.CompiledMLModel if path.suffix == ".mlmodelc" else ct.models.MLModel
            self.model = load(str(path), compute_units=ct.ComputeUnit[compute_units])
            self.state = self.model.make_state() if stateful else None
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ShardmillError(f"{path} can't be loaded: {first}") from error

    def __call__(self, inputs: Mapping[str, Floats]) -> Floats:
        """The program's one output."""
        with self.around():
            outputs = self.model.predict(dict(inputs), state=self.state)
        (result,) = outputs.values()
        return np.asarray(result, dtype=np.float32)
