"""From a few small programs to programs of any sequence of layers and any width.

coremltools numbers what it names (`var_209`, `x_9_cast_fp16`, `transpose_5`). Layers of one kind add the same to every
such number, so a number is affine in how many layers of each kind stand before its own, how many there are in all, and
which rotary tables were used before; and every extent is a constant or a multiple of a width. The forms are read off
sample programs and evaluated for the program wanted. What does not fit raises StampError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from shardmill.errors import ShardmillError

# Samples are made of layers FIRST, FIRST + 1, ...: no other number comes near, so one over it is a layer's index.
FIRST = 1_000_000
NUMBER = re.compile(r"(\d+)")
REMEDY = "use `convert: {method: plain}` for this model"

Path = tuple[Any, ...]  # field names, map keys and indices, from a message to a value in it


class StampError(ShardmillError):
    """A graph whose layers are not alike enough to be stamped."""


@dataclass(frozen=True)
class Place:
    """Where a message stands in a program of layers of K kinds."""

    before: tuple[int, ...]  # layers of each kind before its own, [K]
    total: tuple[int, ...]  # layers of each kind in the program, [K]
    tables: tuple[int, ...]  # for each rotary table, 1 where a layer before uses it, [R]
    absolute: int  # the layer's index in the model
    widths: Mapping[str, int]

    @property
    def counts(self) -> tuple[int, ...]:
        """What numbers depend on: [1 + 2 K + R]."""
        return (1, *self.before, *self.total, *self.tables)


@dataclass(frozen=True)
class Number:
    """Weights of `Place.counts`, or the absolute layer index plus a base."""

    weights: tuple[int, ...]  # [1 + 2 K + R]; (base,) with is_layer
    is_layer: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether it is the same everywhere."""
        return not self.is_layer and not any(self.weights[1:])

    def at(self, place: Place) -> int:
        """The number as it reads at `place`."""
        if self.is_layer:
            return place.absolute + self.weights[0]
        return sum(weight * count for weight, count in zip(self.weights, place.counts, strict=True))


@dataclass(frozen=True)
class Name:
    """Literal text and numbers in turn."""

    pieces: tuple[str | Number, ...]

    def at(self, place: Place) -> str:
        return "".join(p if isinstance(p, str) else str(p.at(place)) for p in self.pieces)


@dataclass(frozen=True)
class Extent:
    """A multiple of a width."""

    width: str
    factor: int

    def at(self, place: Place) -> int:
        return self.factor * place.widths[self.width]


@dataclass(frozen=True)
class Pattern:
    """A message, and what in it depends on its place."""

    base: Message
    holes: tuple[tuple[Path, Name | Extent], ...]

    def stamp(self, place: Place) -> Any:
        """The message as it reads at `place`."""
        message = type(self.base)()
        message.CopyFrom(self.base)
        for path, form in self.holes:
            put(message, path, form.at(place))
        return message


Sighting = tuple[Place, Message]


def fit(sightings: Sequence[Sighting]) -> Pattern:
    """The pattern of a message, given what it looks like at several places."""
    places = [place for place, _ in sightings]
    seen = [list(leaves(message)) for _, message in sightings]
    paths = [path for path, _ in seen[0]]
    if any([path for path, _ in values] != paths for values in seen):
        raise StampError(f"{describe(sightings[0][1])}: is built differently in other layers; {REMEDY}")
    forms = [fit_value([value for _, value in row], places) for row in zip(*seen, strict=True)]
    holes = tuple((path, form) for path, form in zip(paths, forms, strict=True) if form is not None)
    return Pattern(sightings[0][1], holes)


def describe(message: Any) -> str:
    """What a message calls itself, for an error."""
    outputs = getattr(message, "outputs", None)
    return str(outputs[0].name if outputs and not isinstance(outputs[0], str) else getattr(message, "name", "program"))


def fit_value(values: Sequence[Any], places: Sequence[Place]) -> Name | Extent | None:
    """The form of one value, None where it is the same everywhere."""
    if isinstance(values[0], str):
        return fit_name(values, places)
    if all(value == values[0] for value in values):
        return None
    if not all(isinstance(value, int) for value in values):
        raise StampError(f"{values[0]} and {values[-1]}: constants that depend on a width; {REMEDY}")
    for width in places[0].widths:
        factors = {Fraction(value, place.widths[width]) for value, place in zip(values, places, strict=True)}
        if len(factors) == 1 and next(iter(factors)).denominator == 1:
            return Extent(width, int(factors.pop()))
    raise StampError(f"{values[0]} and {values[-1]}: a value that is no multiple of a width; {REMEDY}")


def fit_name(names: Sequence[str], places: Sequence[Place]) -> Name | None:
    """The form of a name, None where it is the same everywhere and holds no layer's index."""
    split = [NUMBER.split(name) for name in names]
    if any(len(s) != len(split[0]) or s[::2] != split[0][::2] for s in split):
        raise StampError(f"{names[0]} and {names[-1]}: named differently in other layers; {REMEDY}")
    numbers = [fit_number([int(s[i]) for s in split], places) for i in range(1, len(split[0]), 2)]
    if all(number.is_constant for number in numbers):
        return None
    texts = split[0][::2]
    return Name((*(piece for pair in zip(texts, numbers, strict=False) for piece in pair), texts[-1]))


def fit_number(values: Sequence[int], places: Sequence[Place]) -> Number:
    """The form of one number in a name."""
    if values[0] >= FIRST:
        offsets = {value - place.absolute for value, place in zip(values, places, strict=True)}
        if len(offsets) == 1:
            return Number((offsets.pop(),), is_layer=True)
        raise StampError(f"{values}: not the index of a layer; {REMEDY}")
    counts = tuple(place.counts for place in places)
    weights = np.rint(inverse(counts) @ np.asarray(values, np.float64)).astype(int)
    if (np.asarray(counts) @ weights != np.asarray(values)).any():
        raise StampError(f"{values}: numbers without a pattern; {REMEDY}")
    return Number(tuple(weights.tolist()))


@lru_cache(maxsize=256)
def inverse(counts: tuple[tuple[int, ...], ...]) -> NDArray[np.float64]:
    """The matrix that gives weights from numbers seen at places with these counts.

    Where one count follows from others, as those of a first layer do, the columns that follow are left out.
    """
    matrix = np.asarray(counts, np.float64)
    kept: list[int] = []
    for column in (0, *reversed(range(1, matrix.shape[1]))):  # totals before counts of what stands before
        if np.linalg.matrix_rank(matrix[:, [*kept, column]]) > len(kept):
            kept.append(column)
    found = np.zeros(matrix.shape[::-1])
    found[kept] = np.linalg.pinv(matrix[:, kept])
    return found


def leaves(message: Any) -> Iterator[tuple[Path, Any]]:
    """Every value of a message with its path, map entries in the order of their keys; but not where a weight lies."""
    if message.DESCRIPTOR.name == "BlobFileValue":  # decided by who writes the weights
        return
    for field, value in message.ListFields():
        for path, item in items(field, value):
            if hasattr(item, "DESCRIPTOR"):
                for inner, leaf in leaves(item):
                    yield (field.name, *path, *inner), leaf
            else:
                yield (field.name, *path), item


def items(field: Any, value: Any) -> list[tuple[Path, Any]]:
    """A field's values with their paths from it."""
    if isinstance(value, MutableMapping):
        return [((key,), value[key]) for key in sorted(value)]
    if field.is_repeated:
        return [((i,), item) for i, item in enumerate(value)]
    return [((), value)]


def put(message: Any, path: Path, value: Any) -> None:
    """Sets the value at a path that `leaves` gave."""
    *way, last = path
    for step in way:
        message = getattr(message, step) if isinstance(message, Message) else message[step]
    if isinstance(message, Message):
        setattr(message, last, value)
    else:
        message[last] = value
