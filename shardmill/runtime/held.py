"""KV caches on the host, for a program without states: the host passes them in and appends each pass's new rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.machine import is_portable
from shardmill.models.contract import Blueprint, caches, new_name
from shardmill.models.host import Floats
from shardmill.runtime.buffers import Buffers

SLOTS = 2  # the slot axis of keys and values
RINGS = "conv_write_mask"  # [1, 1, T, R]: a token's row gives its slot; in the others, [1, 1, S, T], its column


@dataclass
class Held:
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


def held_by_entry(part: Mapping[str, Any]) -> Held | None:
    """Return the caches of a part's entry in model.json; None if the program itself keeps them."""
    written: Mapping[str, str] = part.get("written", {})
    shapes = {name: _shape(part["inputs"][name]) for name in written}
    return Held(written, shapes) if written else None


def held_by_blueprint(blueprint: Blueprint) -> Held | None:
    """Return the caches of a part according to the graph contract; None if the program itself keeps them."""
    if not blueprint.hosted or blueprint.kind != "layers":
        return None
    shapes = caches(blueprint)
    return Held({name: new_name(name) for name in shapes}, {name: _shape(shape) for name, shape in shapes.items()})


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, shape))
