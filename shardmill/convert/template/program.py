"""The template of a kind of program, and the programs composed from it.

A program is a few sequences (operations, inputs, states) in which every layer takes up a stretch, and a rest. Layers of
one kind differ in numbers only, with three exceptions: the first stretch also holds what all layers share, the last has
names of its own, and the first layer to use a rotary table brings what prepares that table. So a template holds a
stretch for each kind and each such role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.convert.template.pattern import FIRST, REMEDY, Pattern, Place, Sighting, StampError, fit, inverse

Stretch = tuple[Pattern, ...]
MOST_BROUGHT = 8


@dataclass(frozen=True)
class Role:
    """What decides a layer's stretch."""

    kind: int
    standing: str  # "first", "inner" or "last"; an only layer is the first
    introduces: bool  # the rotary table of its kind is used by no layer before it


Tables = tuple[str | None, ...]  # the rotary table of each kind


def roles(order: Sequence[int], tables: Tables) -> list[Role]:
    """The role of each layer of a program, given their kinds."""
    found, seen = [], set()
    for index, kind in enumerate(order):
        standing = "first" if index == 0 else "last" if index == len(order) - 1 else "inner"
        found.append(Role(kind, standing, index > 0 and tables[kind] is not None and tables[kind] not in seen))
        seen.add(tables[kind])
    return found


@dataclass(frozen=True)
class Sample:
    """A program that coremltools made with made-up weights, of layers FIRST, FIRST + 1, ... of the given kinds."""

    spec: Any  # Model_pb2.Model
    order: tuple[int, ...]  # the kind of each layer, as a number
    tables: Tables
    widths: Mapping[str, int]

    @property
    def places(self) -> list[Place]:
        """Where its layers stand."""
        return places(self.order, self.tables, FIRST, self.widths)


@dataclass(frozen=True)
class Run:
    """Stretches of a sequence."""

    stretches: Mapping[Role, Stretch]

    def stamp(self, layers: Sequence[Role], at: Sequence[Place]) -> Iterator[Any]:
        """The messages for layers of the given roles at their places."""
        for role, place in zip(layers, at, strict=True):
            for pattern in self.stretches[role]:
                yield pattern.stamp(place)


@dataclass(frozen=True)
class Template:
    """What every program of a form is composed from."""

    tables: Tables
    rest: Pattern
    runs: tuple[Run, ...]

    def compose(self, start: int, order: Sequence[int], widths: Mapping[str, int]) -> Any:
        """The Model_pb2.Model of layers of the kinds `order` from absolute index `start`.

        Its weights have no place yet.
        """
        at = places(order, self.tables, start, widths)
        spec = self.rest.stamp(at[0])
        for sequence, run in zip(sequences(spec), self.runs, strict=True):
            sequence.extend(run.stamp(roles(order, self.tables), at))
        check_closed(spec)
        return spec


def places(order: Sequence[int], tables: Tables, start: int, widths: Mapping[str, int]) -> list[Place]:
    """Where the layers of a program stand, given the kind of each."""
    names = sorted({table for table in tables if table})

    def count(part: Sequence[int]) -> tuple[int, ...]:
        return tuple(part.count(kind) for kind in range(len(tables)))

    def used(part: Sequence[int]) -> tuple[int, ...]:
        seen = {tables[kind] for kind in part}
        return tuple(int(name in seen) for name in names)

    order = tuple(order)
    return [Place(count(order[:i]), count(order), used(order[:i]), start + i, widths) for i in range(len(order))]


def fit_template(samples: Sequence[Sample]) -> Template:
    """The template behind samples whose widths all differ."""
    rows = zip(*(sequences(sample.spec) for sample in samples), strict=True)
    runs = tuple(fit_run([list(sequence) for sequence in row], samples) for row in rows)
    rest = fit([(sample.places[0], without_sequences(sample.spec)) for sample in samples])
    return Template(samples[0].tables, rest, runs)


def fit_run(found: Sequence[list[Any]], samples: Sequence[Sample]) -> Run:
    """The run behind the same sequence of every sample."""
    shared, *lengths = stretch_lengths([len(sequence) for sequence in found], samples)
    fault: StampError | None = None
    for brought in range(min(shared, MOST_BROUGHT) + 1):  # messages that prepare a rotary table
        try:
            return cut_run(found, samples, shared, lengths, brought)
        except StampError as error:
            fault = fault or error
    assert fault is not None
    raise fault


def cut_run(
    found: Sequence[list[Any]], samples: Sequence[Sample], shared: int, lengths: Sequence[int], brought: int
) -> Run:
    """The run behind a sequence, if every table that a layer after the first introduces brings so many messages."""
    seen: dict[Role, list[list[Sighting]]] = {}
    for sequence, sample in zip(found, samples, strict=True):
        layers = roles(sample.order, sample.tables)
        start, before = 0, shared - brought * sum(role.introduces for role in layers)
        for role, place in zip(layers, sample.places, strict=True):
            end = start + lengths[role.kind] + (before if role.standing == "first" else brought * role.introduces)
            seen.setdefault(role, []).append([(place, message) for message in sequence[start:end]])
            start = end
    return Run({role: fit_stretch(stretches) for role, stretches in seen.items()})


def fit_stretch(stretches: Sequence[Sequence[Sighting]]) -> Stretch:
    """The stretch behind those of several layers of one role."""
    if len({len(stretch) for stretch in stretches}) > 1:
        raise StampError(f"layers of {len(stretches[0])} and {len(stretches[-1])} operations; {REMEDY}")
    return tuple(map(fit, zip(*stretches, strict=True)))


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
