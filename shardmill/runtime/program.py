"""One loaded Core ML program with its state, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.models.host import Floats
from shardmill.runtime.functions import TOKENS, Functions
from shardmill.runtime.loading import begins


class Program:
    """A compiled bundle or a package."""

    def __init__(
        self, path: Path, stateful: bool, functions: Functions | None = None, compute_units: str = "CPU_AND_NE"
    ) -> None:
        """Loads it, each function as a model of its own; all of them share one state.

        Args:
            path: where it lies.
            stateful: whether it has states.
            functions: of a program of fixed widths; None where its one function takes passes of any width.
            compute_units: a name of ct.ComputeUnit.

        Raises:
            ShardmillError: where Core ML can't load it.
        """
        import coremltools as ct

        self.name, self.path, self.functions = path.stem, path, functions
        begins(self.name)
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # for who wants to watch it run
        names = dict.fromkeys(functions.names.values()) if functions else {None: None}
        try:
            load = ct.models.CompiledMLModel if path.suffix == ".mlmodelc" else ct.models.MLModel
            units = ct.ComputeUnit[compute_units]
            self.models: dict[str | None, Any] = {
                name: load(str(path), compute_units=units, **({"function_name": name} if name else {}))
                for name in names
            }
            self.stateful = stateful
            self.state = self.fresh_state()
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ShardmillError(f"{path} can't be loaded: {first}") from error

    def fresh_state(self) -> Any:
        """States of zeros, which all functions take; None where there are none."""
        return next(iter(self.models.values())).make_state() if self.stateful else None

    def function(self, tokens: int) -> str:
        """The name of the function that takes so many tokens; "" for a program's only one."""
        return self.functions.names[self.functions.width(tokens)] if self.functions else ""

    def __call__(self, inputs: Mapping[str, Floats]) -> Floats:
        """The program's one output."""
        if self.functions is None:
            return self._run(None, inputs)
        tokens = self.functions.tokens(inputs)
        width = self.functions.width(tokens)
        result = self._run(self.functions.names[width], self.functions.filled(inputs, width))
        return result.take(range(tokens), TOKENS) if tokens < width else result

    def _run(self, function: str | None, inputs: Mapping[str, Floats]) -> Floats:
        with self.around():
            outputs = self.models[function].predict(dict(inputs), state=self.state)
        (result,) = outputs.values()
        return np.asarray(result, dtype=np.float32)
