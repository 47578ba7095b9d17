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
from shardmill.runtime.held import Held
from shardmill.runtime.loading import begins


class Program:
    """A compiled bundle or a package."""

    def __init__(
        self,
        path: Path,
        stateful: bool,
        functions: Functions | None = None,
        held: Held | None = None,
        compute_units: str = "CPU_AND_NE",
    ) -> None:
        """Loads it, each function as a model of its own; all of them share one state.

        Args:
            path: where it lies.
            stateful: whether it has states.
            functions: of a program of a few widths; None where its one function takes passes of any width.
            held: what the host keeps for it.
            compute_units: a name of ct.ComputeUnit.

        Raises:
            ShardmillError: where Core ML can't load it.
        """
        import coremltools as ct

        self.name, self.path, self.functions, self.held = path.stem, path, functions, held
        begins(self.name)
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # for who wants to watch it run
        names = dict.fromkeys(functions.names.values() if functions else [""])
        try:
            load = ct.models.CompiledMLModel if path.suffix == ".mlmodelc" else ct.models.MLModel
            units = ct.ComputeUnit[compute_units]
            self.models: dict[str, Any] = {
                name: load(str(path), compute_units=units, **({"function_name": name} if name else {}))
                for name in names
            }
            self.stateful = stateful
            self.renew()
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ShardmillError(f"{path} can't be loaded: {first}") from error

    def renew(self) -> None:
        """Begins with states of zeros, which all functions take, or with caches of zeros."""
        self.state: Any = next(iter(self.models.values())).make_state() if self.stateful else None
        if self.held:
            self.held.forget()

    def kept(self, name: str) -> Floats:
        """What is kept from pass to pass under a name: a state, or a cache of the host's."""
        found = self.held.arrays[name] if self.held else self.state.read_state(name)
        return np.asarray(found, np.float32)

    def function(self, tokens: int) -> str:
        """The name of the function that takes so many tokens; "" for a program's only one."""
        return self.functions.names[self.functions.width(tokens)] if self.functions else ""

    def __call__(self, inputs: Mapping[str, Floats]) -> Floats:
        """The program's output, the first one; what it adds to caches is added."""
        if self.functions is None:
            outputs = self._run("", inputs)
        else:
            tokens = self.functions.tokens(inputs)
            width = self.functions.width(tokens)
            outputs = self._run(self.functions.names[width], self.functions.filled(inputs, width))
        if self.held:
            self.held.write(outputs, inputs)
        result = self.result(outputs)
        return result if self.functions is None or tokens == width else result.take(range(tokens), TOKENS)

    def result(self, outputs: Mapping[str, Any]) -> Floats:
        """Of a program's outputs the one that is not for a cache."""
        others = self.held.written.values() if self.held else ()
        (found,) = (value for name, value in outputs.items() if name not in others)
        return np.asarray(found, dtype=np.float32)

    def _run(self, function: str, inputs: Mapping[str, Floats]) -> dict[str, Any]:
        caches = self.held.arrays if self.held else {}
        with self.around():
            outputs: dict[str, Any] = self.models[function].predict({**caches, **inputs}, state=self.state)
        return outputs
