"""One loaded Core ML program with its state, for either engine and for all lengths of its context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.machine import is_portable, load_programs_as, native_call, precision
from shardmill.models.host import Floats
from shardmill.printable import first_line
from shardmill.runtime.functions import (
    NONE,
    TOKENS,
    Buffers,
    ContextSize,
    Functions,
    HostCaches,
    carried,
    function_location,
)
from shardmill.runtime.loading import hints, report_load


class Program:
    """A compiled bundle, or a package, or a folder with a bundle for each function."""

    def __init__(
        self,
        path: Path,
        stateful: bool,
        functions: Functions | None = None,
        held: HostCaches | None = None,
        compute_units: str = "CPU_AND_NE",
        lengths: Mapping[int, ContextSize] = NONE,
    ) -> None:
        """Load the program, each function as a separate model; all functions of one length share one state.

        Args:
            path: the bundle, package or folder.
            stateful: True if the program has states.
            functions: the functions of a program of fixed widths; None if a single function accepts passes of any
                width.
            held: the caches that the host keeps for the program.
            compute_units: a name of ct.ComputeUnit.
            lengths: functions per context length, in place of `functions`. The first length is loaded now, the others
                on
                first use.

        Raises:
            ShardmillError: if Core ML can't load the program.
        """
        self.name, self.path, self.functions, self.held = path.stem, path, functions, held
        self.stateful, self.compute_units, self.lengths = stateful, compute_units, lengths
        self.precision = precision()  # also for functions of other lengths, loaded later
        self.slots = next(iter(lengths), 0)  # the current length, if there are several
        if lengths:
            self.functions = lengths[self.slots].functions
            if held:
                held.resize(lengths[self.slots].kept)
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # a hook for observing each run
        self.models: dict[str, Any] = {}
        self.buffers = Buffers()
        self._shapes: set[tuple[Any, ...]] = set()  # of inputs that have run: a shape's first pass takes long
        self.state: Any = self._loaded(self.functions)

    def _loaded(self, functions: Functions | None) -> Any:
        """Load the functions of a length that are not loaded yet; return zeroed states for them."""
        import coremltools as ct

        report_load(self.name)
        try:
            load = ct.models.CompiledMLModel if self.path.suffix == ".mlmodelc" else ct.models.MLModel
            units = ct.ComputeUnit[self.compute_units]
            with load_programs_as(self.precision), native_call():
                for name in (name for name in _names(functions) if name not in self.models):
                    path, function = function_location(self.path, name)
                    named = {"function_name": function} if function else {}
                    self.models[name] = load(str(path), compute_units=units, **named, **hints())
            return self._made_state(functions)
        except Exception as error:
            raise ShardmillError(f"{self.path} can't be loaded: {first_line(error)}") from error

    def _made_state(self, functions: Functions | None) -> Any:
        """Return zeroed states, which all functions of a length share."""
        return self.models[_names(functions)[0]].make_state() if self.stateful else None

    def renew(self) -> None:
        """Replace the states, or clear the caches, with zeros."""
        self.state = self._made_state(self.functions)
        if self.held:
            self.held.forget()

    def move(self, slots: int, keep: bool = True) -> None:
        """Move to another context length; a program with a single length stays unchanged.

        Args:
            slots: slots of that length.
            keep: True to copy states or caches, as far as they fit; False if their contents are no longer needed.

        Raises:
            ShardmillError: if Core ML can't load the functions of that length; the program then stays at its length.
        """
        if slots == self.slots or not self.lengths:
            return
        before, found = self.state, self.lengths[slots]
        self.state = self._loaded(found.functions)
        self.slots, self.functions = slots, found.functions
        if self.held:
            self.held.resize(found.kept)
        for name in found.kept if self.stateful and keep else ():
            self.state.write_state(name, carried(before.read_state(name), self.state.read_state(name)))

    def kept(self, name: str) -> Floats:
        """Return a copy of a state, or of a host's cache: later passes write in place."""
        return np.array(self.held.arrays[name] if self.held else self.state.read_state(name), np.float32)

    def function(self, tokens: int) -> str:
        """Return the name of the function for a pass of `tokens` tokens; "" for a program's only function."""
        return self.functions.names[self.functions.width(tokens)] if self.functions else ""

    def __call__(self, inputs: Mapping[str, Floats]) -> Floats:
        """Run the program and return its first output; write the other outputs to the caches."""
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
        """Return the output that does not belong to a cache."""
        others = self.held.written.values() if self.held else ()
        (found,) = (value for name, value in outputs.items() if name not in others)
        return np.asarray(found, dtype=np.float32)

    def _run(self, function: str, inputs: Mapping[str, Floats]) -> dict[str, Any]:
        caches = self.held.arrays if self.held else {}
        given = {name: self.buffers.filled(name, value) for name, value in inputs.items()}
        shapes = (function, *(value.shape for value in inputs.values()))
        first = native_call() if shapes not in self._shapes else nullcontext()
        self._shapes.add(shapes)
        with self.around(), first:
            outputs: dict[str, Any] = self.models[function].predict({**caches, **given}, state=self.state)
        return outputs


Loaded = TypeVar("Loaded")


def reused(load: Callable[[], Loaded]) -> Callable[[], Loaded]:
    """Return a function that returns what `load` loads, and loads it again only if the precision has changed.

    Core ML has one precision, so there it is loaded once. The portable engine's two precisions are two loads, and only
    one of the two is in memory at a time.
    """
    last: dict[str, Loaded] = {}

    def loaded() -> Loaded:
        key = precision() if is_portable() else ""
        if key not in last:
            last.clear()
            last[key] = load()
        return last[key]

    return loaded


def _names(functions: Functions | None) -> list[str]:
    """Return the names of a length's functions; "" for a program's only function."""
    return list(dict.fromkeys(functions.names.values() if functions else [""]))
