"""Choice of the function that runs a pass, and padding of a pass that is narrower than every function.

A padded pass repeats its last token, so all its numbers are finite. Its write masks are zero for the repeated tokens,
so no state changes, and the rows of these tokens are dropped from the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.models.calls import Calls, own_bundle
from shardmill.models.contract import Blueprint, T, inputs
from shardmill.models.host import Floats

TOKENS = 2  # the token axis of an output [1, channels, T, 1]
WRITES = ("kv_write_mask", "conv_write_mask")  # prefixes of the inputs that are write masks


@dataclass(frozen=True)
class Functions:
    """The functions of a program of fixed widths.

    Attributes:
        names: each function's name by its width in tokens.
        axes: the token axis of each input.
    """

    names: Mapping[int, str]
    axes: Mapping[str, int]

    def width(self, tokens: int) -> int:
        """Return the width for a pass of `tokens` tokens. Raises ShardmillError if no function is wide enough."""
        found = min((width for width in self.names if width >= tokens), default=0)
        if not found:
            raise ShardmillError(f"a pass of {tokens} tokens: the program takes {max(self.names)} at most")
        return found

    def tokens(self, given: Mapping[str, Floats]) -> int:
        """Return the number of tokens of a pass, given its inputs."""
        name = next(name for name in given if name in self.axes)
        return int(given[name].shape[self.axes[name]])

    def filled(self, given: Mapping[str, Floats], width: int) -> dict[str, Floats]:
        """Return the inputs of a pass, padded to a function's width."""
        return {name: _filled(array, self.axes.get(name), width, name) for name, array in given.items()}


def _filled(array: Floats, axis: int | None, width: int, name: str) -> Floats:
    if axis is None or array.shape[axis] == width:
        return array
    missing = width - array.shape[axis]
    last = np.take(array, [-1], axis)
    more = np.repeat(np.zeros_like(last) if name.startswith(WRITES) else last, missing, axis)
    return np.concatenate([array, more], axis)


def located(program: Path, function: str) -> tuple[Path, str]:
    """Return the path to load for a function, and the function's name there, "" if it is the only one."""
    own = own_bundle(program, function)
    return (own, "") if function and own.is_dir() else (program, function)


def of_entry(part: Mapping[str, Any]) -> Functions | None:
    """Return the functions of a part's entry in model.json; None if one function accepts passes of any width."""
    if not part.get("functions"):
        return None
    names = {int(width): str(name) for width, name in part["functions"].items()}
    return Functions(names, _axes(part["inputs"], "T"))


def of_blueprint(blueprint: Blueprint, calls: Calls) -> Functions | None:
    """Return the functions of a part according to the graph contract; None if one function accepts any width."""
    if not calls.functions:
        return None
    return Functions(calls.functions, _axes(inputs(blueprint), T))


def _axes(shapes: Mapping[str, Sequence[Any]], symbol: Any) -> dict[str, int]:
    return {name: list(shape).index(symbol) for name, shape in shapes.items() if symbol in shape}
