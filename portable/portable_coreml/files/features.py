"""What a model's description says of an input, an output or a state, and which shapes that allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from portable_coreml.errors import InputError

_ARRAY_TYPES = {65568: "fp32", 65600: "fp64", 131104: "int32", 65552: "fp16", 131080: "int8"}


@dataclass(frozen=True)
class Feature:
    """One input, output or state.

    `dtype`: of an array; "image" for an image, whose pixels Core ML converts before the program sees them. `ranges`:
    allowed [low, high] per axis, high None = unbounded. `choices`: allowed shapes. Neither: `shape` is the only
    shape; an empty `shape` allows any. `default`: the value of an optional input that is left out.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int | None], ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    optional: bool = False
    default: float | None = None

    def check(self, shape: Sequence[int]) -> None:
        """Raise InputError if an array of this shape is not allowed."""
        got = tuple(shape)
        if self.choices:
            if got not in self.choices:
                raise InputError(
                    f"input '{self.name}' has shape {list(got)}; allowed: {[list(c) for c in self.choices]}"
                )
        elif self.ranges:
            inside = len(got) == len(self.ranges) and all(
                low <= n and (high is None or n <= high) for n, (low, high) in zip(got, self.ranges, strict=True)
            )
            if not inside:
                raise InputError(f"input '{self.name}' has shape {list(got)}; allowed: {_range_text(self.ranges)}")
        elif self.shape and got != self.shape:
            raise InputError(f"input '{self.name}' has shape {list(got)}; the model takes {list(self.shape)}")


def _range_text(ranges: Sequence[tuple[int, int | None]]) -> str:
    parts = [str(lo) if lo == hi else f"{lo}...{'' if hi is None else hi}" for lo, hi in ranges]
    return "[" + ", ".join(parts) + "]"


def feature_of(message: Any) -> Feature:
    """Return the Feature of a FeatureDescription message that describes a multi-array, an image or a state."""
    kind = message.type.WhichOneof("Type")
    array = message.type.stateType.arrayType if kind == "stateType" else message.type.multiArrayType
    flexible = array.WhichOneof("ShapeFlexibility")
    ranges: tuple[tuple[int, int | None], ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    if flexible == "shapeRange":
        pairs = array.shapeRange.sizeRanges
        ranges = tuple((int(r.lowerBound), int(r.upperBound) if r.upperBound >= 0 else None) for r in pairs)
    elif flexible == "enumeratedShapes":
        choices = tuple(tuple(int(d) for d in s.shape) for s in array.enumeratedShapes.shapes)
    field = array.WhichOneof("defaultOptionalValue")
    default = float(getattr(array, field)) if field else None
    dtype = "image" if kind == "imageType" else _ARRAY_TYPES.get(int(array.dataType), "fp32")
    shape = tuple(int(d) for d in array.shape)
    return Feature(message.name, dtype, shape, ranges, choices, bool(message.type.isOptional), default)
