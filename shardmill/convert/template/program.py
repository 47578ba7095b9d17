"""The template of a kind of program, and the programs composed from it.

A program is a few sequences (operations, inputs, states) in which every layer takes up a stretch, and a rest. Layers of
one kind differ in numbers only, except that the first stretch also holds what all layers share, and that the last has
names of its own. So a template holds three stretches for each kind: as the first layer, as the last, and between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.convert.template.pattern import FIRST, REMEDY, Pattern, Place, Sighting, StampError, fit, inverse

Stretch = tuple[Pattern, ...]


@dataclass(frozen=True)
class Sample:
    """A program that coremltools made with made-up weights, of layers FIRST, FIRST + 1, ... of the given kinds."""

    spec: Any  # Model_pb2.Model
    order: tuple[int, ...]  # the kind of each layer, as a number
    kinds: int  # how many there are
    widths: Mapping[str, int]

    @property
    def places(self) -> list[Place]:
        """Where its layers stand."""
        return places(self.order, self.kinds, FIRST, self.widths)


@dataclass(frozen=True)
class Run:
    """Stretches of a sequence by where a layer stands ("first", "inner", "last") and its kind."""

    stretches: Mapping[tuple[str, int], Stretch]

    def stamp(self, order: Sequence[int], at: Sequence[Place]) -> Iterator[Any]:
        """The messages for layers of the kinds `order` at their places."""
        for index, (kind, place) in enumerate(zip(order, at, strict=True)):
            for pattern in self.stretches[standing(index, len(order)), kind]:
                yield pattern.stamp(place)


@dataclass(frozen=True)
class Template:
    """What every program of a form is composed from."""

    kinds: int
    rest: Pattern
    runs: tuple[Run, ...]

    def compose(self, start: int, order: Sequence[int], widths: Mapping[str, int]) -> Any:
        """The Model_pb2.Model of layers of the kinds `order` from absolute index `start`.

        Its weights have no place yet.
        """
        at = places(order, self.kinds, start, widths)
        spec = self.rest.stamp(at[0])
        for sequence, run in zip(sequences(spec), self.runs, strict=True):
            sequence.extend(run.stamp(order, at))
        check_closed(spec)
        return spec


def places(order: Sequence[int], kinds: int, start: int, widths: Mapping[str, int]) -> list[Place]:
    """Where the layers of a program stand, given the kind of each."""

    def count(part: Sequence[int]) -> tuple[int, ...]:
        return tuple(part.count(kind) for kind in range(kinds))

    order = tuple(order)
    return [Place(count(order[:i]), count(order), start + i, widths) for i in range(len(order))]


def standing(index: int, layers: int) -> str:
    """Whether a layer is the first of a program, the last, or between; an only one is the first."""
    return "first" if index == 0 else "last" if index == layers - 1 else "inner"


def fit_template(samples: Sequence[Sample]) -> Template:
    """The template behind samples whose widths all differ."""
    rows = zip(*(sequences(sample.spec) for sample in samples), strict=True)
    runs = tuple(fit_run([list(sequence) for sequence in row], samples) for row in rows)
    rest = fit([(sample.places[0], without_sequences(sample.spec)) for sample in samples])
    return Template(samples[0].kinds, rest, runs)


def fit_run(found: Sequence[list[Any]], samples: Sequence[Sample]) -> Run:
    """The run behind the same sequence of every sample."""
    shared, *lengths = stretch_lengths([len(sequence) for sequence in found], samples)
    seen: dict[tuple[str, int], list[list[Sighting]]] = {}
    for sequence, sample in zip(found, samples, strict=True):
        start = 0
        for index, (kind, place) in enumerate(zip(sample.order, sample.places, strict=True)):
            end = start + lengths[kind] + (shared if index == 0 else 0)
            where = standing(index, len(sample.order)), kind
            seen.setdefault(where, []).append([(place, message) for message in sequence[start:end]])
            start = end
    return Run({where: tuple(map(fit, zip(*stretches, strict=True))) for where, stretches in seen.items()})


def stretch_lengths(totals: Sequence[int], samples: Sequence[Sample]) -> list[int]:
    """How many messages all layers share, and how many a layer of each kind has, given those of each sample."""
    counts = tuple((1, *sample.places[0].total) for sample in samples)
    lengths = np.rint(inverse(counts) @ np.asarray(totals, np.float64)).astype(int)
    if (np.asarray(counts) @ lengths != np.asarray(totals)).any() or (lengths < 0).any():
        raise StampError(f"sequences of {', '.join(map(str, totals))}: not made of like layers; {REMEDY}")
    return [int(length) for length in lengths]


def sequences(spec: Any) -> tuple[Any, ...]:
    """A model's operations, inputs and states: everything that there is more of with every layer."""
    return main_block(spec).operations, main_function(spec).inputs, spec.description.state


def main_function(spec: Any) -> Any:
    """A model's only function."""
    return spec.mlProgram.functions["main"]


def main_block(spec: Any) -> Any:
    """The function's only block."""
    (block,) = main_function(spec).block_specializations.values()
    return block


def without_sequences(spec: Any) -> Any:
    """A copy with the sequences left out."""
    rest = type(spec)()
    rest.CopyFrom(spec)
    for sequence in sequences(rest):
        del sequence[:]
    return rest


def check_closed(spec: Any) -> None:
    """Every name is defined once, before it is used. Raises StampError."""
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
