"""From two small programs to programs of any number of layers and any width.

coremltools numbers what it names (`var_209`, `x_9_cast_fp16`, `transpose_5`). In programs made of like stretches every
such number is affine in the stretch's place k and their number n, and every extent is a constant or a multiple of a
width, plus the channels of what lies beside it. So the forms are read off two sample programs, of n and n + 1 stretches
and of different widths, and evaluated for the program wanted. What does not fit raises StampError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

from google.protobuf.message import Message

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
    """Where a message stands in a program."""

    index: int  # of its stretch
    stretches: int  # how many there are
    absolute: int  # index in the model of the stretch's first layer
    widths: Mapping[str, int]
    beside: tuple[int, ...] = ()  # how many channels may lie after those of a width, whatever it is


@dataclass(frozen=True)
class Number:
    """base + per_index * k + per_stretches * n, or the absolute layer index plus base."""

    base: int
    per_index: int = 0
    per_stretches: int = 0
    is_layer: bool = False

    def at(self, place: Place) -> int:
        """The number as it reads at `place`."""
        if self.is_layer:
            return place.absolute + self.base
        return self.base + self.per_index * place.index + self.per_stretches * place.stretches


@dataclass(frozen=True)
class Name:
    """Literal text and numbers in turn."""

    pieces: tuple[str | Number, ...]

    def at(self, place: Place) -> str:
        """The text as it reads at `place`."""
        return "".join(p if isinstance(p, str) else str(p.at(place)) for p in self.pieces)


@dataclass(frozen=True)
class Extent:
    """A multiple of a width, and the channels that are carried after it."""

    width: str
    factor: int
    plus: int = 0

    def at(self, place: Place) -> int:
        """The number of channels at `place`."""
        return self.factor * place.widths[self.width] + self.plus


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
    """The pattern of a message seen in programs of n and n + 1 stretches, or at a third place too (k + 1, n + 1)."""
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
    for plus, width in product(sorted({0, *places[0].beside}), places[0].widths):
        factors = {Fraction(value - plus, place.widths[width]) for value, place in zip(values, places, strict=True)}
        if len(factors) == 1 and next(iter(factors)).denominator == 1:
            return Extent(width, int(factors.pop()), plus)
    raise StampError(f"{values[0]} and {values[-1]}: a value that is no multiple of a width; {REMEDY}")


def fit_name(names: Sequence[str], places: Sequence[Place]) -> Name | None:
    """The form of a name, None where it is the same everywhere and holds no layer's index."""
    split = [NUMBER.split(name) for name in names]
    if any(len(s) != len(split[0]) or s[::2] != split[0][::2] for s in split):
        raise StampError(f"{names[0]} and {names[-1]}: named differently in other layers; {REMEDY}")
    numbers = [_fit_number([int(s[i]) for s in split], places) for i in range(1, len(split[0]), 2)]
    if all(number == Number(number.base) for number in numbers):
        return None
    texts = split[0][::2]
    return Name((*(piece for pair in zip(texts, numbers, strict=False) for piece in pair), texts[-1]))


def _fit_number(values: Sequence[int], places: Sequence[Place]) -> Number:
    """The form of one number in a name."""
    if values[0] >= FIRST:
        offsets = {value - place.absolute for value, place in zip(values, places, strict=True)}
        if len(offsets) == 1:
            return Number(offsets.pop(), is_layer=True)
        raise StampError(f"{values}: not the index of a layer; {REMEDY}")
    first, second, *third = values
    per_stretches, per_index = second - first, third[0] - second if third else 0
    base = first - per_index * places[0].index - per_stretches * places[0].stretches
    form = Number(base, per_index, per_stretches)
    if any(form.at(place) != value for value, place in zip(values, places, strict=True)):
        raise StampError(f"{values}: numbers without a pattern; {REMEDY}")
    return form


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
