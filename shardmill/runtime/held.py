"""What a program without states needs of earlier passes: the host keeps it, hands it in, and adds what a pass gives."""

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

SLOTS = 2  # the axis of keys and values on which slots lie
RINGS = "conv_write_mask"  # [1, 1, T, R]: a token's slot is told by its row; in the others, [1, 1, S, T], by its column


@dataclass
class Held:
    """The caches of one program.

    Core ML takes and gives fp32, so its caches are fp32 from the start and are written in place (see buffers.py). The
    portable engine's are fp16 until its first answer says that it computes in fp32.

    Attributes:
        written: by a cache's name, which is that of the input, the output that holds what a pass adds to it.
        shapes: of the caches.
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
        """Go on with caches of other numbers of slots, which hold what these held, as far as they reach."""
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        for name, shape in self.shapes.items():
            old = self.arrays[name]
            if old.shape == shape:  # a ring stays as it is
                continue
            new = self._buffers.array(name, shape, old.dtype).astype(old.dtype, copy=False)
            new.fill(0)
            self.arrays[name] = carried(old, new)

    def write(self, outputs: Mapping[str, Any], given: Mapping[str, Floats]) -> None:
        """Puts what a pass gave into the slots that its masks name.

        Args:
            outputs: of the program; rows of tokens beyond those of the masks are left out.
            given: the pass' inputs.
        """
        for name, output in self.written.items():
            rows = np.asarray(outputs[output])
            if rows.dtype != self.arrays[name].dtype:  # an engine that computes in fp32 says so by its first answer
                self.arrays[name] = self.arrays[name].astype(rows.dtype)
            cache = self.arrays[name]
            if name.startswith("c_"):
                slots = given[RINGS][0, 0].argmax(axis=1)
                cache[..., slots] = rows[..., : len(slots)]
            else:
                slots = _slots(cache.shape[2], given)
                cache[:, :, slots] = rows[:, :, : len(slots)]


def carried(before: NDArray[Any], into: NDArray[Any]) -> NDArray[Any]:
    """Puts into a cache [1, ., slots, .] what another of the same layer holds, as far as both reach.

    A ring, of keys and values or of a convolution, is the same in every context, so all of it is carried.
    """
    rows = min(before.shape[SLOTS], into.shape[SLOTS])
    into[:, :, :rows] = before[:, :, :rows]
    return into


def _slots(count: int, given: Mapping[str, Floats]) -> Any:
    """The slot of each token, by the write mask for caches of so many slots."""
    mask = next(mask for name, mask in given.items() if name.startswith("kv_write_mask") and mask.shape[2] == count)
    return mask[0, 0].argmax(axis=0)


def held_by_entry(part: Mapping[str, Any]) -> Held | None:
    """The caches of a part as model.json has it; None where its program keeps them."""
    written: Mapping[str, str] = part.get("written", {})
    shapes = {name: _shape(part["inputs"][name]) for name in written}
    return Held(written, shapes) if written else None


def held_by_blueprint(blueprint: Blueprint) -> Held | None:
    """Those of a part by what the graph contract says of it."""
    if not blueprint.hosted or blueprint.kind != "layers":
        return None
    shapes = caches(blueprint)
    return Held({name: new_name(name) for name in shapes}, {name: _shape(shape) for name, shape in shapes.items()})


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, shape))
