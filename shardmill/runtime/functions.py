"""Which function of a program takes a pass, and how a pass that is narrower than any of them is filled up.

A filled-up pass repeats its last token, whose numbers are as finite as they were; its masks say that what is repeated
is written nowhere, so no state differs, and its rows of the output are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.models.calls import Calls
from shardmill.models.contract import Form, T, inputs
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
        name = next(iter(given))
        return int(given[name].shape[self.axes[name]])

    def filled(self, given: Mapping[str, Floats], width: int) -> dict[str, Floats]:
        """The inputs of a pass for the function of a width."""
        return {name: _filled(array, self.axes[name], width, name) for name, array in given.items()}


def _filled(array: Floats, axis: int, width: int, name: str) -> Floats:
    missing = width - array.shape[axis]
    if not missing:
        return array
    last = np.take(array, [-1], axis)
    more = np.repeat(np.zeros_like(last) if name.startswith(WRITES) else last, missing, axis)
    return np.concatenate([array, more], axis)


def of_entry(part: Mapping[str, Any]) -> Functions | None:
    """Those of a part as model.json has it; None where one function takes passes of any width."""
    if not part.get("functions"):
        return None
    names = {int(width): str(name) for width, name in part["functions"].items()}
    return Functions(names, {name: _axis(shape, "T") for name, shape in part["inputs"].items()})


def of_form(form: Form, calls: Calls) -> Functions | None:
    """Those of a part by what the graph contract says of it."""
    if not calls.functions:
        return None
    return Functions(calls.functions, {name: _axis(shape, T) for name, shape in inputs(form).items()})


def _axis(shape: Sequence[Any], symbol: Any) -> int:
    return list(shape).index(symbol)
