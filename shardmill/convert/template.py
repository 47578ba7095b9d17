"""Templates: from programs of one layer of each kind to programs of any layers.

coremltools converts one layer of each kind at the model's widths, with its weights as inputs (convert/trace.py). In
normal form, the layer's text depends on its kind and its index alone. Its index here is a number that occurs nowhere
else, so each layer's text is the template's with other names. Templates depend on the graph's numbers, never on a
weight, and may be kept in a cache folder shared by all models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardmill.convert.cache import cached
from shardmill.convert.normal import STATE, Normal, SharedOperation, normal_form
from shardmill.convert.package import check_closed, copied, main_block, main_function, named_arguments, parse_spec
from shardmill.convert.stacks import stack_inputs
from shardmill.models.architecture import LayerSpec
from shardmill.models.contract import GraphSpec, tap_name
from shardmill.models.interface import FIXED, EntryPoints
from shardmill.models.part_kinds import PART_KINDS, traced_inputs
from shardmill.models.recurrences import written

INDEX, LENDER = "2000000", "1000000"  # of a template's layer, and of the layer whose cache it reads
WHOLE = "whole"  # the only piece of a head, a group of experts or an encoder
Moved = Callable[[str], str]  # a name in a template, as it reads in a program


def _mover(index: int, source: int | None) -> Moved:
    """Return what a name in a template reads for the layer `index`, which may read the cache of the layer `source`."""
    return lambda name: name.replace(INDEX, str(index)).replace(LENDER, str(source))


def _moved_feature(feature: Any, move: Moved) -> Any:
    """Return a copy of an input, a state or an output under its name in a program."""
    copy = copied(feature)
    copy.name = move(copy.name)
    return copy


def _moved_operation(operation: Any, move: Moved) -> Any:
    """Return a copy of an operation with the names of a program."""
    copy = copied(operation)
    for named in (*copy.outputs, *(argument for _, argument in named_arguments(copy))):
        named.name = move(named.name)
    title = copy.attributes["name"].immediateValue.tensor.strings.values
    title[0] = move(title[0])
    return copy


@dataclass(frozen=True)
class DescribedFeature:
    """An input or a state as the model's description has it, and as its function has it."""

    described: Any
    taken: Any


@dataclass(frozen=True)
class Template:
    """The operations, weights, inputs, outputs and states that a layer of a kind, or a head, adds to a program."""

    shared: Mapping[str, SharedOperation]
    weights: Mapping[str, Any]  # weights that belong to no layer
    piece: str  # the name of its operations in normal form
    operations: tuple[Any, ...]
    inputs: tuple[DescribedFeature, ...]
    states: tuple[DescribedFeature, ...]
    rows: tuple[Any, ...]  # outputs with the new rows of the host's caches
    rest: Any


def template_of(spec: Any, piece: str) -> Template:
    """Return the template that a program is, as one piece of that name."""
    normal = normal_form(spec, lambda steps, *_: {piece: steps})
    taken = {value.name: value for value in main_function(spec).inputs}

    inputs, states = (
        tuple(DescribedFeature(one, taken[one.name]) for one in described)
        for described in (spec.description.input, spec.description.state)
    )
    rows = tuple(spec.description.output[1:])
    return Template(normal.shared, normal.weights, piece, normal.pieces[piece], inputs, states, rows, _rest(spec))


def _rest(spec: Any) -> Any:
    """Return a copy without the layers' operations, inputs, states and further outputs."""
    rest = copied(spec)
    for sequence in (rest.description.input, rest.description.state, main_function(rest).inputs):
        del sequence[:]
    for outputs in (rest.description.output, main_block(rest).outputs):
        del outputs[1:]
    del main_block(rest).operations[:]
    return rest


def compose(
    templates: Sequence[Template],
    start: int,
    inputs: Sequence[str],
    sources: Mapping[int, int] = MappingProxyType({}),
    taps: Sequence[int] = (),
) -> Any:
    """Return the Model_pb2.Model with one layer for each template; its weights have no place yet.

    Args:
        templates: the templates of the layers' kinds, in order, or the one template of any other part.
        start: the first layer's index in the model.
        inputs: names of the program's inputs, in order.
        sources: for a layer that reads the cache of another, that layer's index.
        taps: layers whose input is a further output.
    """
    layers = [(template, index, sources.get(index)) for index, template in enumerate(templates, start)]
    spec = _without_operations(layers, inputs)
    shared: dict[str, SharedOperation] = {}
    weights: dict[str, Any] = {}
    pieces: dict[str, tuple[Any, ...]] = {}
    for template, index, source in layers:
        shared |= template.shared
        weights |= template.weights
        move, lent = _mover(index, source), _updated_caches(pieces.get(f"layer_{source}", ()))
        operations = tuple(_moved_operation(operation, move) for operation in template.operations)
        for argument in (one for operation in operations for _, one in named_arguments(operation)):
            argument.name = lent.get(argument.name, argument.name)
        pieces[move(template.piece)] = operations
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


def _without_operations(layers: Sequence[tuple[Template, int, int | None]], inputs: Sequence[str]) -> Any:
    """Return a model without operations; it has all layers' inputs once, then each layer's states."""
    spec = copied(layers[0][0].rest)
    block, function, described = main_block(spec), main_function(spec), spec.description
    moved = [(template, _mover(index, source)) for template, index, source in layers]
    known = {move(one.taken.name): (one, move) for template, move in moved for one in template.inputs}

    def take(feature: DescribedFeature, move: Moved, among: Any) -> None:
        among.append(_moved_feature(feature.described, move))
        function.inputs.append(_moved_feature(feature.taken, move))

    for name in inputs:
        take(*known[name], described.input)
    for template, move in moved:
        for row in template.rows:
            described.output.append(_moved_feature(row, move))
            block.outputs.append(described.output[-1].name)
    for template, move in moved:
        for feature in template.states:
            take(feature, move, described.state)
    return spec


def _updated_caches(operations: Iterable[Any]) -> dict[str, str]:
    """Return what a layer's operations make of its caches, with the new tokens in it, by the caches' names.

    That is what is read from a state last or, if the host has the caches, the sum of new rows and of a product with the
    old cache.
    """
    updated, products = dict[str, str](), dict[str, str]()
    for operation in operations:
        for _, argument in named_arguments(operation):
            if operation.type == "read_state":
                updated[argument.name] = operation.outputs[0].name
            elif operation.type == "mul" and STATE.fullmatch(argument.name):
                products[operation.outputs[0].name] = argument.name
            elif operation.type == "add" and argument.name in products:
                updated[products[argument.name]] = operation.outputs[0].name
    return updated


def program(part_spec: GraphSpec, cache: Path | None) -> Any:
    """Return the Model_pb2.Model of a part, composed from templates; its weights are constants of fp16 without a place.

    Args:
        part_spec: the part's spec.
        cache: a folder in which templates are kept between processes, or None.

    Raises:
        StampError: for a graph that can't be stamped.
    """
    layers = dict((*part_spec.lent, *part_spec.layers))
    sources = {i: part_spec.source(i) for i, kind in part_spec.layers if kind.shares}
    alone = separate(part_spec, [layers[sources[i]] if i in sources else None for i, _ in part_spec.layers])
    start = part_spec.layers[0][0] if part_spec.layers else 0
    spec = compose(
        [template(one, cache) for one in alone], start, list(traced_inputs(part_spec)), sources, part_spec.taps
    )
    stack_inputs(spec, part_spec)
    return spec


def separate(part_spec: GraphSpec, lenders: Sequence[LayerSpec | None]) -> list[GraphSpec]:
    """Return what the templates of a part depend on: its spec for each layer alone, or as a whole.

    coremltools optimises across the layers of an encoder, which is therefore converted whole.

    Args:
        part_spec: the part's spec.
        lenders: for each layer that reads the cache of another, that layer's kind; the cache is then an input.
    """
    calls = part_spec.calls
    if calls.shapes != FIXED:  # then widths are only described
        calls = EntryPoints(state=calls.state, adapters=calls.adapters)
    whole = replace(part_spec, calls=calls, taps=())
    if not PART_KINDS[part_spec.kind].by_layer:
        return [whole]
    return [
        replace(whole, layers=((int(INDEX), kind),), lent=((int(LENDER), lender),) if lender else ())
        for (_, kind), lender in zip(part_spec.layers, lenders, strict=True)
    ]


@lru_cache(maxsize=8)
def template(alone: GraphSpec, cache: Path | None) -> Template:
    """Return the template of a kind of layer: from this process, or the cache folder, or coremltools.

    Args:
        alone: one that `separate` returns.
        cache: where programs are kept, or None.
    """

    def make() -> bytes:
        from shardmill.convert import trace

        return bytes(trace.convert(alone).SerializeToString(deterministic=True))

    spec = parse_spec(cached(cache, asdict(alone, dict_factory=written), make) if cache else make())
    return template_of(spec, f"layer_{INDEX}" if PART_KINDS[alone.kind].by_layer else WHOLE)
