"""The template of plain layers, a head or an encoder, and the programs composed from it in coremltools' own names.

A program is a few sequences (operations, inputs, states) and a rest. A sequence consists of stretches, one for each
layer: the first also holds what the layers share, the last has names of its own, and those between differ in numbers
only. A head is a single stretch, and so are an encoder and a single layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.convert.template.pattern import FIRST, REMEDY, Pattern, Place, Sighting, StampError, fit
from shardmill.models.calls import MAIN


@dataclass(frozen=True)
class Sample:
    """A program that coremltools made with made-up weights; its first layer has the index FIRST."""

    spec: Any  # Model_pb2.Model
    stretches: int
    widths: Mapping[str, int]
    beside: tuple[int, ...] = ()  # channels that a token may have beside the residual stream

    def at(self, index: int) -> Place:
        """Where a stretch stands."""
        return Place(index, self.stretches, FIRST + index, self.widths, self.beside)


@dataclass(frozen=True)
class Run:
    """Patterns of a sequence: the first stretch, one between, the last."""

    first: tuple[Pattern, ...]
    inner: tuple[Pattern, ...]
    last: tuple[Pattern, ...]

    def stamp(self, places: Sequence[Place]) -> Iterator[Any]:
        """The messages of stretches at `places`."""
        for place in places:
            stretch = self.first if place.index == 0 else self.last if place is places[-1] else self.inner
            for pattern in stretch:
                yield pattern.stamp(place)


@dataclass(frozen=True)
class Template:
    """What all programs of one kind of part are composed from."""

    rest: Pattern
    runs: tuple[Run, ...]

    def compose(self, start: int, stretches: int, widths: Mapping[str, int]) -> Any:
        """The Model_pb2.Model of some stretches from the layer `start`; its weights have no place yet."""
        places = [Place(k, stretches, start + k, widths) for k in range(stretches)]
        spec = self.rest.stamp(places[0])
        for sequence, run in zip(sequences(spec), self.runs, strict=True):
            sequence.extend(run.stamp(places))
        check_closed(spec)
        return spec


def fit_template(a: Sample, b: Sample) -> Template:
    """The template behind two samples of different widths, of n >= 3 and n + 1 stretches, or of one each."""
    runs = tuple(_fit_run(list(x), list(y), a, b) for x, y in zip(sequences(a.spec), sequences(b.spec), strict=True))
    rest = fit([(sample.at(0), _without_sequences(sample.spec)) for sample in (a, b)])
    return Template(rest, runs)


def sequences(spec: Any) -> tuple[Any, ...]:
    """A model's operations, inputs and states: everything that there is more of with every layer."""
    return main_block(spec).operations, main_function(spec).inputs, spec.description.state


def main_function(spec: Any) -> Any:
    """A model's only function, or of several the default one."""
    return spec.mlProgram.functions[spec.description.defaultFunctionName or MAIN]


def main_block(spec: Any) -> Any:
    """The function's only block."""
    (block,) = main_function(spec).block_specializations.values()
    return block


def _without_sequences(spec: Any) -> Any:
    """A copy with the sequences left out."""
    rest = type(spec)()
    rest.CopyFrom(spec)
    for sequence in sequences(rest):
        del sequence[:]
    return rest


def _fit_run(xs: list[Any], ys: list[Any], a: Sample, b: Sample) -> Run:
    """The run behind a sequence of sample a and the same of b, which has one stretch more unless both have one."""
    stretch = len(ys) - len(xs)  # messages of one
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
