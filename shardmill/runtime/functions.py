"""The functions of a program by width and context, and the caches that a host keeps for it."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardmill.errors import ShardmillError
from shardmill.machine import is_portable
from shardmill.models.contract import GraphSpec, T, caches, inputs, new_name
from shardmill.models.host import Floats
from shardmill.models.interface import EntryPoints, own_bundle

OWNED = 30.0  # seconds that an array outlives its program; Core ML has been seen to own inputs for one second

Arrays = dict[tuple[str, tuple[int, ...]], NDArray[np.generic]]
_retired: deque[tuple[float, Arrays]] = deque()  # arrays of programs that are gone, the oldest first


class Buffers:
    """The arrays of one program, by the input's name and shape."""

    def __init__(self) -> None:
        self._arrays: Arrays = {}
        free_retired()
        weakref.finalize(self, _retire, self._arrays)

    def filled(self, name: str, value: NDArray[np.floating]) -> NDArray[np.generic]:
        """Return the array of an input, in fp32, filled with the numbers of `value`."""
        array = self.array(name, value.shape, np.float32)
        np.copyto(array, value)
        return array

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """Return the array of an input with its previous contents; zeros if the array is new."""
        found = self._arrays.get((name, shape))
        if found is None:
            found = self._arrays[name, shape] = np.zeros(shape, dtype)
        return found


def _retire(arrays: Arrays) -> None:
    _retired.append((time.monotonic(), arrays))


def free_retired() -> None:
    """Free the arrays of programs that have been gone for so long that Core ML no longer owns them."""
    while _retired and time.monotonic() - _retired[0][0] > OWNED:
        _retired.popleft()


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


def function_location(program: Path, function: str) -> tuple[Path, str]:
    """Return the path to load for a function, and the function's name there, "" if it is the only one."""
    own = own_bundle(program, function)
    return (own, "") if function and own.is_dir() else (program, function)


def of_entry(part: Mapping[str, Any]) -> Functions | None:
    """Return the functions of a part's entry in model.json; None if one function accepts passes of any width."""
    if not part.get("functions"):
        return None
    names = {int(width): str(name) for width, name in part["functions"].items()}
    return Functions(names, _axes(part["inputs"], "T"))


def of_blueprint(blueprint: GraphSpec, calls: EntryPoints) -> Functions | None:
    """Return the functions of a part according to the graph contract; None if one function accepts any width."""
    if not calls.functions:
        return None
    return Functions(calls.functions, _axes(inputs(blueprint), T))


def _axes(shapes: Mapping[str, Sequence[Any]], symbol: Any) -> dict[str, int]:
    return {name: list(shape).index(symbol) for name, shape in shapes.items() if symbol in shape}


Shapes = Mapping[str, tuple[int, ...]]  # by name


@dataclass(frozen=True)
class ContextSize:
    """A program in a context of a given number of slots.

    Attributes:
        functions: the functions that run its passes.
        kept: the shapes of the states, or of the host's caches.
    """

    functions: Functions
    kept: Shapes


NONE: Mapping[int, ContextSize] = {}  # for a program whose passes all use the same functions


def lengths_by_entry(part: Mapping[str, Any], context: int) -> dict[int, ContextSize]:
    """Return the lengths of a part's entry in model.json, by slots, ascending.

    The result is empty if all passes use the same functions.

    Args:
        part: the part's entry.
        context: slots of the whole context.
    """
    whole, found = of_entry(part), {}
    if whole is None or "contexts" not in part:
        return {}
    for slots, shorter in (*part["contexts"].items(), (context, {"functions": part["functions"]})):
        shapes = {key: {**part[key], **shorter.get(key, {})} for key in ("inputs", "states")}
        kept = {name: shapes["inputs"][name] for name in part["written"]} if "written" in part else shapes["states"]
        names = {int(width): str(name) for width, name in shorter["functions"].items()}
        found[int(slots)] = ContextSize(Functions(names, whole.axes), {n: tuple(map(int, s)) for n, s in kept.items()})
    return found


def lengths_by_blueprint(blueprints: Mapping[int, GraphSpec], calls: EntryPoints) -> dict[int, ContextSize]:
    """Return the lengths of a part according to the graph contract, by slots, ascending.

    Args:
        blueprints: the part's blueprint at each length, the whole context last.
        calls: the part's functions.
    """
    whole = of_blueprint(blueprints[max(blueprints)], calls)
    if whole is None or not calls.contexts:
        return {}
    return {
        slots: ContextSize(Functions(calls.shorter.get(slots, whole.names), whole.axes), caches(blueprint))
        for slots, blueprint in blueprints.items()
    }


SLOTS = 2  # the slot axis of keys and values
RINGS = "conv_write_mask"  # [1, 1, T, R]: a token's row gives its slot; in the others, [1, 1, S, T], its column


@dataclass
class HostCaches:
    """The caches of one program.

    Core ML's inputs and outputs are fp32, so its caches are fp32 from the start and are written in place (see
    buffers.py). The portable engine's caches are fp16 until its first output shows that it computes in fp32.

    Attributes:
        written: for each cache, by the name of its input, the output with the rows that a pass adds.
        shapes: the shapes of the caches.
    """

    written: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    arrays: dict[str, Any] = field(init=False)
    _buffers: Buffers = field(init=False, default_factory=Buffers)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Fill the caches with zeros."""
        kind = np.float16 if is_portable() else np.float32
        self.arrays = {name: self._buffers.array(name, shape, kind) for name, shape in self.shapes.items()}
        for array in self.arrays.values():
            array.fill(0)

    def resize(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Change the number of slots of the caches and keep their contents, as far as they fit."""
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        for name, shape in self.shapes.items():
            old = self.arrays[name]
            if old.shape == shape:  # a ring stays as it is
                continue
            new = self._buffers.array(name, shape, old.dtype).astype(old.dtype, copy=False)
            new.fill(0)
            self.arrays[name] = carried(old, new)

    def write(self, outputs: Mapping[str, Any], given: Mapping[str, Floats]) -> None:
        """Write the new rows of a pass into the slots that its masks name.

        Args:
            outputs: the program's outputs; rows of tokens beyond the masks' tokens are ignored.
            given: the inputs of the pass.
        """
        for name, output in self.written.items():
            rows = np.asarray(outputs[output])
            if rows.dtype != self.arrays[name].dtype:  # an engine that computes in fp32 shows it in its first output
                self.arrays[name] = self.arrays[name].astype(rows.dtype)
            cache = self.arrays[name]
            if name.startswith("c_"):
                slots = given[RINGS][0, 0].argmax(axis=1)
                cache[..., slots] = rows[..., : len(slots)]
            else:
                slots = _slots(cache.shape[2], given)
                cache[:, :, slots] = rows[:, :, : len(slots)]


def carried(before: NDArray[Any], into: NDArray[Any]) -> NDArray[Any]:
    """Copy the contents of one cache [1, ., slots, .] into another cache of the same layer, as far as they fit.

    A ring, of keys and values or of a convolution, is the same in every context, so all of its contents are copied.
    """
    rows = min(before.shape[SLOTS], into.shape[SLOTS])
    into[:, :, :rows] = before[:, :, :rows]
    return into


def _slots(count: int, given: Mapping[str, Floats]) -> Any:
    """Return the slot of each token, from the write mask for caches of `count` slots."""
    mask = next(mask for name, mask in given.items() if name.startswith("kv_write_mask") and mask.shape[2] == count)
    return mask[0, 0].argmax(axis=0)


def held_by_entry(part: Mapping[str, Any]) -> HostCaches | None:
    """Return the caches of a part's entry in model.json; None if the program itself keeps them."""
    written: Mapping[str, str] = part.get("written", {})
    shapes = {name: _shape(part["inputs"][name]) for name in written}
    return HostCaches(written, shapes) if written else None


def held_by_blueprint(blueprint: GraphSpec) -> HostCaches | None:
    """Return the caches of a part according to the graph contract; None if the program itself keeps them."""
    if not blueprint.hosted or blueprint.kind != "layers":
        return None
    shapes = caches(blueprint)
    return HostCaches(
        {name: new_name(name) for name in shapes}, {name: _shape(shape) for name, shape in shapes.items()}
    )


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, shape))
