"""Templates: from small sample programs to programs of any layers and any width.

The template of a kind of layer is read off two programs of one such layer in normal form, of different widths. In
normal form, a layer's text depends on its index and on the widths alone. Every extent is a constant, or a multiple of a
width plus the channels beside it, and the indices of the samples' layers are numbers that occur nowhere else. A value
that does not fit raises StampError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from shardmill.convert.normal import STATE, Normal, SharedOperation, normal_form
from shardmill.convert.package import REMEDY, StampError, check_closed, copied, main_block, main_function
from shardmill.models.contract import tap_name

INDEX = 1_000_000  # the index of the first layer of a sample
MARK = re.compile(r"1000\d{3}")  # the index of any of its layers
Widths = Mapping[str, int]
Path = tuple[Any, ...]  # field names, map keys and indices, from a message to a value in it


@dataclass(frozen=True)
class Extent:
    """A multiple of a width, and the channels that are carried after it."""

    width: str
    factor: int
    plus: int = 0


@dataclass(frozen=True)
class Pattern:
    """A message, and the values in it that depend on a width or hold the index of a layer."""

    base: Message
    holes: tuple[tuple[Path, str | Extent], ...]

    def stamp(self, index: int, widths: Widths, source: int | None = None) -> Any:
        """Return the message for the layer `index` of a model, which may read the cache of the layer `source`."""
        message = copied(self.base)
        for path, hole in self.holes:
            if isinstance(hole, str):
                _put_value(message, path, _moved(hole, index, source))
            else:
                _put_value(message, path, hole.factor * widths[hole.width] + hole.plus)
        return message


def _moved(name: str, index: int, source: int | None) -> str:
    """Return a name in a sample as it reads if the sample's layers have other indices.

    The first layer has `index`. If there is a `source`, the first layer has that, and the second has `index`.
    """

    def number(found: re.Match[str]) -> str:
        at = int(found[0]) - INDEX
        return str(index + at if source is None else (source, index)[at])

    return MARK.sub(number, name)


@dataclass(frozen=True)
class Sample:
    """A program that coremltools made with made-up weights."""

    spec: Any  # Model_pb2.Model
    widths: Widths
    beside: tuple[int, ...] = ()  # how many channels may lie after the channels of a width


@dataclass(frozen=True)
class DescribedFeature:
    """An input or a state as the model's description has it, and as its function has it."""

    described: Pattern
    taken: Pattern


@dataclass(frozen=True)
class Template:
    """The operations, weights, inputs, outputs and states that a layer of a kind, or a head, adds to a program."""

    shared: Mapping[str, SharedOperation]
    weights: Mapping[str, Pattern]  # weights that belong to no layer
    pieces: Mapping[str, tuple[Pattern, ...]]
    inputs: Mapping[str, DescribedFeature]
    states: tuple[DescribedFeature, ...]
    held: tuple[DescribedFeature, ...]  # inputs of a single layer: the host's caches and the tokens' rows
    rows: tuple[Pattern, ...]  # outputs with the new rows of the inputs in `held`
    rest: Pattern

    def second(self) -> Template:
        """Return what the second layer of a sample adds to a program; it reads the cache of the first."""
        own = str(INDEX + 1)

        def belongs(feature: DescribedFeature) -> bool:
            return own in feature.taken.base.name

        return replace(
            self,
            pieces={name: patterns for name, patterns in self.pieces.items() if own in name},
            states=tuple(filter(belongs, self.states)),
            held=tuple(filter(belongs, self.held)),
            rows=tuple(pattern for pattern in self.rows if own in pattern.base.name),
        )


def fit(a: Sample, b: Sample) -> Template:
    """Return the template behind two samples of different widths. Raises StampError."""
    x, y = normal_form(a.spec), normal_form(b.spec)
    lengths = [{name: len(operations) for name, operations in each.pieces.items()} for each in (x, y)]
    if x.shared != y.shared or lengths[0] != lengths[1]:
        raise StampError(f"{a.widths} and {b.widths}: other operations at another width; {REMEDY}")

    def seen(one: Message, other: Message) -> Pattern:
        return fit_pattern(one, other, (a.widths, b.widths), a.beside)

    def features(kind: str) -> dict[str, DescribedFeature]:
        described = zip(*(getattr(sample.spec.description, kind) for sample in (a, b)), strict=True)
        taken = [{value.name: value for value in main_function(sample.spec).inputs} for sample in (a, b)]
        return {x.name: DescribedFeature(seen(x, y), seen(taken[0][x.name], taken[1][y.name])) for x, y in described}

    inputs = features("input")
    return Template(
        x.shared,
        {name: seen(one, y.weights[name]) for name, one in x.weights.items()},
        {
            name: tuple(seen(one, other) for one, other in zip(operations, y.pieces[name], strict=True))
            for name, operations in x.pieces.items()
        },
        {name: feature for name, feature in inputs.items() if not STATE.fullmatch(name)},
        tuple(features("state").values()),
        tuple(feature for name, feature in inputs.items() if STATE.fullmatch(name)),
        tuple(seen(*both) for both in zip(*(s.spec.description.output[1:] for s in (a, b)), strict=True)),
        seen(_rest(a.spec), _rest(b.spec)),
    )


def _rest(spec: Any) -> Any:
    """Return a copy without the layers' operations, inputs, states and further outputs."""
    rest = copied(spec)
    for sequence in (rest.description.input, rest.description.state, main_function(rest).inputs):
        del sequence[:]
    for outputs in (rest.description.output, main_block(rest).outputs):
        del outputs[1:]
    del main_block(rest).operations[:]
    return rest


def fit_pattern(one: Message, other: Message, widths: Sequence[Widths], beside: Sequence[int] = ()) -> Pattern:
    """Return the pattern of a message seen at two sets of widths, in layers of the index INDEX.

    Args:
        one: the message at the first widths.
        other: the message at the second widths.
        widths: the two sets.
        beside: how many channels may lie after the channels of a width.

    Raises:
        StampError: if the messages differ in anything but extents.
    """
    seen = [list(_leaves(message)) for message in (one, other)]
    if [path for path, _ in seen[0]] != [path for path, _ in seen[1]]:
        raise StampError(f"{_describe(one)}: is built differently at another width; {REMEDY}")
    holes: list[tuple[Path, str | Extent]] = []
    for (path, x), (_, y) in zip(*seen, strict=True):
        if x != y:
            holes.append((path, _fit_extent(x, y, widths, beside)))
        elif isinstance(x, str) and MARK.search(x):
            holes.append((path, x))
    return Pattern(one, tuple(holes))


def _describe(message: Any) -> str:
    """Return the name of a message, for an error text."""
    outputs = getattr(message, "outputs", None)
    return str(outputs[0].name if outputs else getattr(message, "name", "program"))


def _fit_extent(x: Any, y: Any, widths: Sequence[Widths], beside: Sequence[int]) -> Extent:
    """Return the form of a value that differs between the samples."""
    if isinstance(x, int) and isinstance(y, int):
        for plus, width in product(sorted({0, *beside}), widths[0]):
            factors = {Fraction(value - plus, each[width]) for value, each in zip((x, y), widths, strict=True)}
            if len(factors) == 1 and next(iter(factors)).denominator == 1:
                return Extent(width, int(factors.pop()), plus)
    raise StampError(f"{x!r} and {y!r}: a value that is no multiple of a width; {REMEDY}")


def _leaves(message: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every value of a message with its path, except places of weights; map entries by their keys."""
    if message.DESCRIPTOR.name == "BlobFileValue":  # the writer of the weights sets it
        return
    for field, value in message.ListFields():
        for path, item in _items(field, value):
            if hasattr(item, "DESCRIPTOR"):
                for inner, leaf in _leaves(item):
                    yield (field.name, *path, *inner), leaf
            else:
                yield (field.name, *path), item


def _items(field: Any, value: Any) -> list[tuple[Path, Any]]:
    """Return a field's values with their paths relative to the field."""
    if isinstance(value, MutableMapping):
        return [((key,), value[key]) for key in sorted(value)]
    if field.is_repeated:
        return [((i,), item) for i, item in enumerate(value)]
    return [((), value)]


def _put_value(message: Any, path: Path, value: Any) -> None:
    """Set the value at a path that `_leaves` yielded."""
    *way, last = path
    for step in way:
        message = getattr(message, step) if isinstance(message, Message) else message[step]
    if isinstance(message, Message):
        setattr(message, last, value)
    else:
        message[last] = value


def compose(
    templates: Sequence[Template],
    start: int,
    inputs: Sequence[str],
    widths: Widths,
    sources: Mapping[int, int] = MappingProxyType({}),
    taps: Sequence[int] = (),
) -> Any:
    """Return the Model_pb2.Model with one layer for each template; its weights have no place yet.

    Args:
        templates: the templates of the layers' kinds, in order, or the one template of any other part.
        start: the first layer's index in the model.
        inputs: names of the program's inputs, in order.
        widths: the model's widths.
        sources: for a layer that reads the cache of another, that layer's index; its template is a `second`.
        taps: layers whose input is a further output.
    """
    layers = [(template, index, sources.get(index)) for index, template in enumerate(templates, start)]
    spec = _without_operations(layers, inputs, widths)
    shared: dict[str, SharedOperation] = {}
    weights: dict[str, Any] = {}
    pieces: dict[str, tuple[Any, ...]] = {}
    for template, index, source in layers:
        shared |= template.shared
        weights |= {name: p.stamp(index, widths) for name, p in template.weights.items() if name not in weights}
        for name, patterns in template.pieces.items():
            pieces[_moved(name, index, source)] = tuple(p.stamp(index, widths, source) for p in patterns)
    block = main_block(spec)
    block.operations.extend(
        Normal(shared, weights, pieces).operations(spec.description.input[0].name, block.outputs[0], taps)
    )
    for layer in taps:  # the stream between two layers, which needs no operation
        described = copied(spec.description.output[0])
        described.name = tap_name(layer)
        spec.description.output.append(described)
        block.outputs.append(described.name)
    check_closed(spec)
    return spec


def _without_operations(
    layers: Sequence[tuple[Template, int, int | None]], inputs: Sequence[str], widths: Widths
) -> Any:
    """Return a model without operations; it has all layers' inputs once, then each layer's states."""
    (first, start, _), *_ = layers
    spec = first.rest.stamp(start, widths)
    block, function, described = main_block(spec), main_function(spec), spec.description

    def take(feature: DescribedFeature, index: int, among: Any, source: int | None = None) -> None:
        among.append(feature.described.stamp(index, widths, source))
        function.inputs.append(feature.taken.stamp(index, widths, source))

    known = {name: (feature, index) for template, index, _ in layers for name, feature in template.inputs.items()}
    held = {
        _moved(feature.taken.base.name, index, source): (feature, index, source)
        for template, index, source in layers
        for feature in template.held
    }
    for name in inputs:
        if name in held:
            feature, index, source = held[name]
            take(feature, index, described.input, source)
        else:
            take(*known[name], described.input)
    for template, index, source in layers:
        for pattern in template.rows:
            described.output.append(pattern.stamp(index, widths, source))
            block.outputs.append(described.output[-1].name)
    for template, index, source in layers:
        for feature in template.states:
            take(feature, index, described.state, source)
    return spec
