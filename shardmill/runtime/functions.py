"""Which function of a program takes a pass, and how a pass that is narrower than any of them is filled up.

A filled-up pass repeats its last token, whose numbers are as finite as they were; its masks say that what is repeated
is written nowhere, so no state differs, and its rows of the output are left out.
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

TOKENS = 2  # the axis of an output [1, channels, T, 1] on which its tokens lie
WRITES = ("kv_write_mask", "conv_write_mask")  # how inputs begin that say what is written


@dataclass(frozen=True)
class Functions:
    """The functions of a program of fixed widths.

    Attributes:
        names: each one's name by the tokens that it takes.
        axes: on which axis of each input the tokens lie.
    """

    names: Mapping[int, str]
    axes: Mapping[str, int]

    def width(self, tokens: int) -> int:
        """The width that takes so many tokens. Raises ShardmillError for more than any takes."""
        found = min((width for width in self.names if width >= tokens), default=0)
        if not found:
            raise ShardmillError(f"a pass of {tokens} tokens: the program takes {max(self.names)} at most")
        return found

    def tokens(self, given: Mapping[str, Floats]) -> int:
        """How many a pass has, by its inputs."""
        name = next(name for name in given if name in self.axes)
        return int(given[name].shape[self.axes[name]])

    def filled(self, given: Mapping[str, Floats], width: int) -> dict[str, Floats]:
        """The inputs of a pass for the function of a width."""
        return {name: _filled(array, self.axes.get(name), width, name) for name, array in given.items()}


def _filled(array: Floats, axis: int | None, width: int, name: str) -> Floats:
    if axis is None or array.shape[axis] == width:
        return array
    missing = width - array.shape[axis]
    last = np.take(array, [-1], axis)
    more = np.repeat(np.zeros_like(last) if name.startswith(WRITES) else last, missing, axis)
    return np.concatenate([array, more], axis)


def located(program: Path, function: str) -> tuple[Path, str]:
    """What is loaded to call a function, and the function's name there, "" for the only one."""
    own = own_bundle(program, function)
    return (own, "") if function and own.is_dir() else (program, function)


def of_entry(part: Mapping[str, Any]) -> Functions | None:
    """Those of a part as model.json has it; None where one function takes passes of any width."""
    if not part.get("functions"):
        return None
    names = {int(width): str(name) for width, name in part["functions"].items()}
    return Functions(names, _axes(part["inputs"], "T"))


def of_blueprint(blueprint: Blueprint, calls: Calls) -> Functions | None:
    """Those of a part by what the graph contract says of it."""
    if not calls.functions:
        return None
    return Functions(calls.functions, _axes(inputs(blueprint), T))


def _axes(shapes: Mapping[str, Sequence[Any]], symbol: Any) -> dict[str, int]:
    return {name: list(shape).index(symbol) for name, shape in shapes.items() if symbol in shape}
