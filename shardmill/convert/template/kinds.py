"""Programs of layers of any kinds, composed from one template for each kind.

The template of a kind is derived from two programs of one layer in normal form, of different widths. In normal form,
the layers before and after a layer do not change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.convert.normal import STATE, Normal, SharedConstants, normal_form
from shardmill.convert.template.pattern import (
    REMEDY,
    Pattern,
    Place,
    Sample,
    StampError,
    check_closed,
    fit,
    main_block,
    main_function,
)


@dataclass(frozen=True)
class KindFeature:
    """An input or a state as the model's description has it, and as its function has it."""

    described: Pattern
    taken: Pattern


@dataclass(frozen=True)
class LayerTemplate:
    """The operations, weights, inputs, outputs and states that a layer of a kind adds to a program."""

    shared: Mapping[str, SharedConstants]
    weights: Mapping[str, Pattern]  # weights that belong to no layer
    operations: tuple[Pattern, ...]
    inputs: Mapping[str, KindFeature]
    states: Mapping[str, KindFeature]
    held: Mapping[str, KindFeature]  # inputs that replace states
    rows: tuple[Pattern, ...]  # outputs with the new rows of the inputs in `held`
    rest: Pattern


def fit_layer(a: Sample, b: Sample) -> LayerTemplate:
    """Return the template behind two samples of one layer, of different widths. Raises StampError."""
    x, y = normal_form(a.spec), normal_form(b.spec)
    (xs,), (ys,) = x.layers.values(), y.layers.values()
    if x.shared != y.shared or len(xs) != len(ys):
        raise StampError(f"{a.widths} and {b.widths}: other operations at another width; {REMEDY}")

    def seen(one: Any, other: Any) -> Pattern:
        return fit([(a.at(0), one), (b.at(0), other)])

    def features(kind: str) -> dict[str, KindFeature]:
        described = zip(*(getattr(sample.spec.description, kind) for sample in (a, b)), strict=True)
        taken = [{value.name: value for value in main_function(sample.spec).inputs} for sample in (a, b)]
        return {x.name: KindFeature(seen(x, y), seen(taken[0][x.name], taken[1][y.name])) for x, y in described}

    return LayerTemplate(
        x.shared,
        {name: seen(one, y.weights[name]) for name, one in x.weights.items()},
        tuple(seen(one, other) for one, other in zip(xs, ys, strict=True)),
        {name: feature for name, feature in features("input").items() if not STATE.fullmatch(name)},
        features("state"),
        {name: feature for name, feature in features("input").items() if STATE.fullmatch(name)},
        tuple(seen(*both) for both in zip(*(s.spec.description.output[1:] for s in (a, b)), strict=True)),
        seen(_rest(a.spec), _rest(b.spec)),
    )


def compose(templates: Sequence[LayerTemplate], start: int, inputs: Sequence[str], widths: Mapping[str, int]) -> Any:
    """Return the Model_pb2.Model with one layer for each template; its weights have no place yet.

    Args:
        templates: the templates of the layers' kinds, in order.
        start: the first layer's index in the model.
        inputs: names of the program's inputs, in order.
        widths: the model's widths.
    """
    places = [Place(0, 1, start + i, widths) for i in range(len(templates))]
    layers = list(zip(templates, places, strict=True))
    spec, block = _with_features(layers, inputs)
    shared: dict[str, SharedConstants] = {}
    weights: dict[str, Any] = {}
    for template, place in layers:
        shared |= template.shared
        weights |= {name: pattern.stamp(place) for name, pattern in template.weights.items() if name not in weights}
    stamped = {place.absolute: tuple(p.stamp(place) for p in template.operations) for template, place in layers}
    block.operations.extend(Normal(shared, weights, stamped).operations(block.outputs[0]))
    check_closed(spec)
    return spec


def _with_features(layers: Sequence[tuple[LayerTemplate, Place]], inputs: Sequence[str]) -> tuple[Any, Any]:
    """Return a model without operations, and its block; it has all layers' inputs once, then each layer's states."""
    (first, place), *_ = layers
    spec = first.rest.stamp(place)
    known = {name: (feature, at) for template, at in layers for name, feature in template.inputs.items()}
    function = main_function(spec).inputs
    for feature, at in (known[name] for name in inputs if not STATE.fullmatch(name)):
        spec.description.input.append(feature.described.stamp(at))
        function.append(feature.taken.stamp(at))
    for feature, at in ((feature, at) for template, at in layers for feature in template.held.values()):
        spec.description.input.append(feature.described.stamp(at))
        function.append(feature.taken.stamp(at))
    for pattern, at in ((pattern, at) for template, at in layers for pattern in template.rows):
        row = pattern.stamp(at)
        spec.description.output.append(row)
        main_block(spec).outputs.append(row.name)
    for feature, at in ((feature, at) for template, at in layers for feature in template.states.values()):
        spec.description.state.append(feature.described.stamp(at))
        function.append(feature.taken.stamp(at))
    return spec, main_block(spec)


def _rest(spec: Any) -> Any:
    """Return a copy without the layers' operations, inputs, states and further outputs."""
    rest = type(spec)()
    rest.CopyFrom(spec)
    for sequence in (rest.description.input, rest.description.state, main_function(rest).inputs):
        del sequence[:]
    for outputs in (rest.description.output, main_block(rest).outputs):
        del outputs[1:]
    del main_block(rest).operations[:]
    return rest
