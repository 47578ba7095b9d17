"""From two small programs to programs of any number of layers and any width.

coremltools puts numbers into names (`var_209`, `x_9_cast_fp16`, `transpose_5`). In programs of like stretches, every
such number is affine in the place k of its stretch and in the number n of stretches. Every extent is a constant, or a
multiple of a width plus the channels beside it. So these forms are derived from two sample programs, of n and n + 1
stretches and of different widths, and evaluated for the wanted program. A value that does not fit raises StampError.
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
from shardmill.models.interface import MAIN

# Samples consist of layers FIRST, FIRST + 1, ... No other number is as large, so a number from FIRST on is an index.
FIRST = 1_000_000
NUMBER = re.compile(r"(\d+)")
REMEDY = "use `convert: {method: plain}` for this model"

Path = tuple[Any, ...]  # field names, map keys and indices, from a message to a value in it


class StampError(ShardmillError):
    """A graph whose layers are not alike enough to be stamped."""


@dataclass(frozen=True)
class Place:
    """The place of a message in a program."""

    index: int  # index of its stretch
    stretches: int  # number of stretches
    absolute: int  # index in the model of the stretch's first layer
    widths: Mapping[str, int]
    beside: tuple[int, ...] = ()  # how many channels may lie after the channels of a width


@dataclass(frozen=True)
class Number:
    """base + per_index * k + per_stretches * n, or the absolute layer index plus base."""

    base: int
    per_index: int = 0
    per_stretches: int = 0
    is_layer: bool = False

    def at(self, place: Place) -> int:
        """Return the number as it reads at `place`."""
        if self.is_layer:
            return place.absolute + self.base
        return self.base + self.per_index * place.index + self.per_stretches * place.stretches


@dataclass(frozen=True)
class Name:
    """Literal text and numbers in turn."""

    pieces: tuple[str | Number, ...]

    def at(self, place: Place) -> str:
        """Return the text as it reads at `place`."""
        return "".join(p if isinstance(p, str) else str(p.at(place)) for p in self.pieces)


@dataclass(frozen=True)
class Extent:
    """A multiple of a width, and the channels that are carried after it."""

    width: str
    factor: int
    plus: int = 0

    def at(self, place: Place) -> int:
        """Return the number of channels at `place`."""
        return self.factor * place.widths[self.width] + self.plus


@dataclass(frozen=True)
class Pattern:
    """A message, and the values in it that depend on its place."""

    base: Message
    holes: tuple[tuple[Path, Name | Extent], ...]

    def stamp(self, place: Place) -> Any:
        """Return the message as it reads at `place`."""
        message = type(self.base)()
        message.CopyFrom(self.base)
        for path, form in self.holes:
            _put_values(message, path, form.at(place))
        return message


Sighting = tuple[Place, Message]


def fit(sightings: Sequence[Sighting]) -> Pattern:
    """Return the pattern of a message seen in programs of n and n + 1 stretches, or also at (k + 1, n + 1)."""
    places = [place for place, _ in sightings]
    seen = [list(leaves(message)) for _, message in sightings]
    paths = [path for path, _ in seen[0]]
    if any([path for path, _ in values] != paths for values in seen):
        raise StampError(f"{describe(sightings[0][1])}: is built differently in other layers; {REMEDY}")
    forms = [fit_value([value for _, value in row], places) for row in zip(*seen, strict=True)]
    holes = tuple((path, form) for path, form in zip(paths, forms, strict=True) if form is not None)
    return Pattern(sightings[0][1], holes)


def describe(message: Any) -> str:
    """Return the name of a message, for an error text."""
    outputs = getattr(message, "outputs", None)
    return str(outputs[0].name if outputs and not isinstance(outputs[0], str) else getattr(message, "name", "program"))


def fit_value(values: Sequence[Any], places: Sequence[Place]) -> Name | Extent | None:
    """Return the form of one value, or None if the value is the same everywhere."""
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
    """Return the form of a name, or None if the name is the same everywhere and holds no layer's index."""
    split = [NUMBER.split(name) for name in names]
    if any(len(s) != len(split[0]) or s[::2] != split[0][::2] for s in split):
        raise StampError(f"{names[0]} and {names[-1]}: named differently in other layers; {REMEDY}")
    numbers = [_fit_number([int(s[i]) for s in split], places) for i in range(1, len(split[0]), 2)]
    if all(number == Number(number.base) for number in numbers):
        return None
    texts = split[0][::2]
    return Name((*(piece for pair in zip(texts, numbers, strict=False) for piece in pair), texts[-1]))


def _fit_number(values: Sequence[int], places: Sequence[Place]) -> Number:
    """Return the form of one number in a name."""
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
    """Yield every value of a message with its path, except places of weights; map entries by their keys."""
    if message.DESCRIPTOR.name == "BlobFileValue":  # the writer of the weights sets it
        return
    for field, value in message.ListFields():
        for path, item in items(field, value):
            if hasattr(item, "DESCRIPTOR"):
                for inner, leaf in leaves(item):
                    yield (field.name, *path, *inner), leaf
            else:
                yield (field.name, *path), item


def items(field: Any, value: Any) -> list[tuple[Path, Any]]:
    """Return a field's values with their paths relative to the field."""
    if isinstance(value, MutableMapping):
        return [((key,), value[key]) for key in sorted(value)]
    if field.is_repeated:
        return [((i,), item) for i, item in enumerate(value)]
    return [((), value)]


def _put_values(message: Any, path: Path, value: Any) -> None:
    """Set the value at a path that `leaves` yielded."""
    *way, last = path
    for step in way:
        message = getattr(message, step) if isinstance(message, Message) else message[step]
    if isinstance(message, Message):
        setattr(message, last, value)
    else:
        message[last] = value


@dataclass(frozen=True)
class Sample:
    """A program that coremltools made with made-up weights; its first layer has the index FIRST."""

    spec: Any  # Model_pb2.Model
    stretches: int
    widths: Mapping[str, int]
    beside: tuple[int, ...] = ()  # channels that a token may have beside the residual stream

    def at(self, index: int) -> Place:
        """Return the place of a stretch."""
        return Place(index, self.stretches, FIRST + index, self.widths, self.beside)


@dataclass(frozen=True)
class Run:
    """Patterns of a sequence: the first stretch, an inner stretch, the last stretch."""

    first: tuple[Pattern, ...]
    inner: tuple[Pattern, ...]
    last: tuple[Pattern, ...]

    def stamp(self, places: Sequence[Place]) -> Iterator[Any]:
        """Yield the messages of stretches at `places`."""
        for place in places:
            stretch = self.first if place.index == 0 else self.last if place is places[-1] else self.inner
            for pattern in stretch:
                yield pattern.stamp(place)


@dataclass(frozen=True)
class Template:
    """The common patterns of all programs of one kind of part."""

    rest: Pattern
    runs: tuple[Run, ...]

    def compose(self, start: int, stretches: int, widths: Mapping[str, int]) -> Any:
        """Return the Model_pb2.Model of `stretches` stretches, from layer `start` on; its weights have no place yet."""
        places = [Place(k, stretches, start + k, widths) for k in range(stretches)]
        spec = self.rest.stamp(places[0])
        for sequence, run in zip(sequences(spec), self.runs, strict=True):
            sequence.extend(run.stamp(places))
        check_closed(spec)
        return spec


def fit_template(a: Sample, b: Sample) -> Template:
    """Return the template behind two samples of different widths, of n >= 3 and n + 1 stretches, or of one each."""
    runs = tuple(_fit_run(list(x), list(y), a, b) for x, y in zip(sequences(a.spec), sequences(b.spec), strict=True))
    rest = fit([(sample.at(0), _without_sequences(sample.spec)) for sample in (a, b)])
    return Template(rest, runs)


def sequences(spec: Any) -> tuple[Any, ...]:
    """Return a model's operations, inputs and states: the sequences that grow with every layer."""
    return main_block(spec).operations, main_function(spec).inputs, spec.description.state


def main_function(spec: Any) -> Any:
    """Return a model's only function, or the default one of several."""
    return spec.mlProgram.functions[spec.description.defaultFunctionName or MAIN]


def main_block(spec: Any) -> Any:
    """Return the function's only block."""
    (block,) = main_function(spec).block_specializations.values()
    return block


def _without_sequences(spec: Any) -> Any:
    """Return a copy with the sequences left out."""
    rest = type(spec)()
    rest.CopyFrom(spec)
    for sequence in sequences(rest):
        del sequence[:]
    return rest


def _fit_run(xs: list[Any], ys: list[Any], a: Sample, b: Sample) -> Run:
    """Return the run behind sequences of samples a and b; b has one more stretch, unless both have one."""
    stretch = len(ys) - len(xs)  # messages of one stretch
    shared = len(xs) - a.stretches * stretch
    if stretch < 0 or shared < 0 or (stretch and a.stretches == b.stretches):
        raise StampError(f"sequences of {len(xs)} and {len(ys)}: not made of like layers; {REMEDY}")

    def at(sample: Sample, sequence: list[Any], index: int, i: int) -> Sighting:
        return sample.at(index), sequence[i + (shared + index * stretch if index else 0)]

    def last(i: int) -> list[Sighting]:
        return [at(sample, sequence, sample.stretches - 1, i) for sample, sequence in ((a, xs), (b, ys))]

    first = tuple(fit([at(a, xs, 0, i), at(b, ys, 0, i)]) for i in range(shared + stretch))
    inner = tuple(fit([at(a, xs, 1, i), at(b, ys, 1, i), at(b, ys, 2, i)]) for i in range(stretch))
    return Run(first, inner, tuple(fit(last(i)) for i in range(stretch)))


def check_closed(spec: Any) -> None:
    """Check that every name is defined once, before it is used. Raises StampError."""
    defined = {value.name for value in main_function(spec).inputs}
    for operation in main_block(spec).operations:
        for argument in (a for key in sorted(operation.inputs) for a in operation.inputs[key].arguments):
            if argument.WhichOneof("binding") == "name" and argument.name not in defined:
                raise StampError(f"{argument.name}: used before it is defined; {REMEDY}")
        for output in operation.outputs:
            if output.name in defined:
                raise StampError(f"{output.name}: defined twice; {REMEDY}")
            defined.add(output.name)
    if missing := [name for name in main_block(spec).outputs if name not in defined]:
        raise StampError(f"{missing[0]}: an output that nothing defines; {REMEDY}")
