"""_State: the states of one conversation (CoreMLPython.mm:1087-1089)."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulated_mac.features import convert, returned
from simulated_mac.native_calls import demand, is_text


class State:
    """MLState. It is made by newState() of a model."""

    def __init__(self, inner: Any, made_by: str) -> None:
        self.inner, self.made_by = inner, made_by

    def read_state(self, *arguments: Any) -> Any:
        """Return a copy of a state, as float32 (CoreMLPythonUtils.mm:449-453)."""
        demand(len(arguments) == 1 and is_text(*arguments), "read_state")
        return returned(self._known(arguments[0]).numpy().astype(np.float16))

    def write_state(self, *arguments: Any) -> None:
        """Replace a state. An array of float16 is refused: only predict's inputs are converted (model.py:1064)."""
        demand(len(arguments) == 2 and is_text(arguments[0]), "write_state")
        name, value = arguments[0], convert(arguments[1])
        if not isinstance(value, np.ndarray):
            raise RuntimeError("Failed to write state, only multi-array value is supported")
        before = self._known(name)
        if tuple(before.shape) != value.shape:
            raise RuntimeError(f"The shapes of the source {value.shape} and the state {tuple(before.shape)} differ")
        self.inner.write_state(name, value.astype(np.float16))

    def _known(self, name: str) -> Any:
        if name not in self.inner.values:
            raise RuntimeError(f"The state with name {name} is not found")
        return self.inner.values[name]
