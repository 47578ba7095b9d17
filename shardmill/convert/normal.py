"""The normal form of a program: the names and places of a layer's operations follow from the layer's kind.

coremltools numbers the values of a whole program and lets layers share constants. It puts operations that depend only
on the inputs where their results are first used. So a layer's text depends on all layers before it. In normal form,
operations that depend only on the inputs come first, sorted by depth and name. Every other operation belongs to one
layer, and a layer's operations keep their order. Each operation has separate constants. A name consists of the layer's
index, the operation's number in the layer, and the operation's type. Weights, inputs, states and the output keep their
names. Values and arithmetic do not change.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardmill.convert.template.pattern import REMEDY, StampError, main_block, main_function
from shardmill.models.architecture import LayerSpec
from shardmill.plan import Part

STREAM = "x"  # the input that the first layer reads
WEIGHT = re.compile(r"layers_(\d+)_")  # how the name of a layer's weight begins
STATE = re.compile(r"[a-z]_(\d+)")


def reads(operation: Any) -> list[str]:
    """Return the names that an operation reads, in the order of its parameters' names."""
    arguments = (argument for key in sorted(operation.inputs) for argument in operation.inputs[key].arguments)
    return [argument.name for argument in arguments if argument.WhichOneof("binding") == "name"]


def constants_by_layer(
    steps: Sequence[Any], weights: Collection[str], states: Collection[str]
) -> dict[int, Sequence[Any]]:
    """Return the operations of each layer, by the layer's index in the model.

    Args:
        steps: operations in order, without constants and without steps that depend on neither stream, state nor weight.
        weights: names of the program's weights.
        states: names of the program's states.

    Raises:
        StampError: if more than one value leads from a layer to the next.
    """
    first: dict[int, int] = {}  # place of the first step that reads a layer's weight or state
    for place, step in enumerate(steps):
        for name in reads(step):
            found = WEIGHT.match(name) if name in weights else STATE.fullmatch(name) if name in states else None
            if found:
                first.setdefault(int(found[1]), place)
    joints, indices, ends = _joints(steps), sorted(first), [0]
    for index in indices[1:]:
        end = 1 + max((place for place in joints if place < first[index]), default=-1)
        if end <= ends[-1]:
            raise StampError(f"layer {index}: more than one value leads to it; {REMEDY}")
        ends.append(end)
    bounds = pairwise([*ends, len(steps)])
    return {index: steps[start:end] for index, (start, end) in zip(indices, bounds, strict=True)}


def _joints(steps: Sequence[Any]) -> list[int]:
    """Return the places of one-result operations after which neither the stream nor an earlier result is read."""
    last = {name: place for place, step in enumerate(steps) for name in reads(step)}
    return list(_places(steps, last))


def _places(steps: Sequence[Any], last: dict[str, int]) -> Iterator[int]:
    """Yield the places of `_joints`, given the place at which each value is read last."""
    open_until = last[STREAM]
    for place, step in enumerate(steps):
        if open_until <= place and len(step.outputs) == 1:
            yield place
        open_until = max([open_until, *(last.get(output.name, place) for output in step.outputs)])


LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopabcdef")  # no digit of a digest shall be read as a layer's index
Named = Mapping[str, Any]  # operations by the name of their first result


@dataclass(frozen=True)
class SharedConstants:
    """An operation that depends on the program's inputs only, preceded by its constants."""

    depth: int  # operations on the longest way from an input
    operations: tuple[Any, ...]


@dataclass(frozen=True)
class Normal:
    """A program's operations. Layer I reads the stream as layer_I_in and leaves it as layer_I_out."""

    shared: Mapping[str, SharedConstants]  # by name; equal computations have equal names
    weights: Named  # weights that belong to no layer
    layers: Mapping[int, tuple[Any, ...]]

    def operations(self, output: str) -> Iterator[Any]:
        """Yield all operations in order; `output` is the name of the program's result."""
        for name in sorted(self.shared, key=lambda name: (self.shared[name].depth, name)):
            yield from self.shared[name].operations
        left, stream, last = dict(self.weights), STREAM, max(self.layers)
        for index, operations in self.layers.items():
            left_as = output if index == last else layer_out(index)
            for operation in operations:
                _rename(operation, {layer_in(index): stream, layer_out(index): left_as})
                yield from (left.pop(name) for name in reads(operation) if name in left)
                yield operation
            stream = left_as


def layer_in(index: int) -> str:
    """Return the name of the residual stream that a layer reads."""
    return f"layer_{index}_in"


def layer_out(index: int) -> str:
    """Return the name of the residual stream that a layer returns."""
    return f"layer_{index}_out"


def has_normal_form(part: Part) -> bool:
    """Return whether the part's program is in normal form.

    Only parts of layers have a normal form. If all layers of a part are plain, the host must also keep its caches.

    All other parts of plain layers keep coremltools' names, under which their packages were published.
    """
    return part.kind == "layers" and (set(part.kinds) != {LayerSpec()} or part.blueprint.hosted)


def normalise(spec: Any, inline: Collection[str] = ()) -> None:
    """Bring the program of a part of layers into normal form, in place; arguments and errors as for `normal_form`."""
    block = main_block(spec)
    operations = list(normal_form(spec, inline).operations(block.outputs[0]))
    del block.operations[:]
    block.operations.extend(operations)


def normal_form(spec: Any, inline: Collection[str] = ()) -> Normal:
    """Return the operations of a program of layers, copied.

    Args:
        spec: the program.
        inline: names of the weights that the program itself holds; all others lie in the weight file.

    Raises:
        StampError: if more than one value leads from a layer to the next.
    """
    operations = list(main_block(spec).operations)
    states = {state.name for state in spec.description.state} | held(spec)
    weights = {op.outputs[0].name: op for op in operations if _holds_weight(op, inline)}
    constants = {op.outputs[0].name: op for op in operations if op.type == "const" and not _holds_weight(op, inline)}
    steps = [op for op in operations if op.type != "const" and not _holds_weight(op, inline)]
    fixed = {value.name for value in main_function(spec).inputs} - states - {STREAM}
    shared, names, moving = _shared(steps, constants, fixed)
    layers: dict[int, tuple[Any, ...]] = {}
    kept = set(main_block(spec).outputs[1:])
    left, stream = {name: op for name, op in weights.items() if WEIGHT.match(name)}, STREAM
    for index, layer in constants_by_layer(_with_rows_early(moving, kept), weights, states).items():
        names[stream] = layer_in(index)
        layers[index] = tuple(_layer(index, layer, constants, left, names, kept))
        stream = layer[-1].outputs[0].name
    return Normal(shared, {name: op for name, op in weights.items() if not WEIGHT.match(name)}, layers)


def held(spec: Any) -> set[str]:
    """Return the names of the inputs that are caches."""
    return {feature.name for feature in spec.description.input if STATE.fullmatch(feature.name)}


def _with_rows_early(steps: Sequence[Any], rows: Collection[str]) -> list[Any]:
    """Return the steps in order, but move each step that only makes rows for the host right after its last operand.

    coremltools puts such steps of all layers at the end.
    """
    used = {name for step in steps for name in reads(step)}
    late = [step for step in steps if step.outputs and {out.name for out in step.outputs} <= set(rows) - used]
    found = [step for step in steps if not any(step is one for one in late)]
    for step in late:
        made_of = set(reads(step))
        last = max(place for place, one in enumerate(found) if made_of & {out.name for out in one.outputs})
        found.insert(last + 1, step)
    return found


def _holds_weight(operation: Any, inline: Collection[str]) -> bool:
    """Return whether an operation is a constant in the weight file, or a constant whose name is in `inline`."""
    if operation.type == "const" and operation.outputs[0].name in inline:
        return True
    arguments = [argument.value for key in operation.inputs for argument in operation.inputs[key].arguments]
    values = [*(operation.attributes[key] for key in operation.attributes), *arguments]
    return any(value.WhichOneof("value") == "blobFileValue" for value in values)


def _shared(
    steps: list[Any], constants: Named, fixed: Collection[str]
) -> tuple[dict[str, SharedConstants], dict[str, str], list[Any]]:
    """Split operations by whether they depend on `fixed` values only; return the new names of results, too."""
    shared: dict[str, SharedConstants] = {}
    names: dict[str, str] = {}
    depths, moving = dict.fromkeys(fixed, 0), list[Any]()
    for step in steps:
        read = [name for name in reads(step) if name not in constants]
        if any(name not in depths for name in read):
            moving.append(step)
            continue
        depth, name = 1 + max(depths[name] for name in read), f"shared_{step.type}_{_digest(step, constants, names)}"
        depths |= {output.name: depth for output in step.outputs}
        names |= _results(step, name)
        shared[name] = SharedConstants(depth, tuple(_written(step, name, constants, names)))
    return shared, names, moving


def _digest(step: Any, constants: Named, names: Mapping[str, str]) -> str:
    """Return a digest of an operation's computation, independent of the names in this program."""
    copy = _copied(step)
    del copy.attributes["name"]
    for output in copy.outputs:
        output.name = ""
    for _, argument in _arguments(copy):
        if argument.name in constants:
            argument.value.CopyFrom(constants[argument.name].attributes["val"])
        else:
            argument.name = names.get(argument.name, argument.name)
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()[:8].translate(LETTERS)


def _layer(
    index: int,
    steps: Sequence[Any],
    constants: Named,
    left: dict[str, Any],
    names: dict[str, str],
    kept: Collection[str],
) -> Iterator[Any]:
    """Yield the operations of a layer.

    The layer's weights are taken out of `left`. The new names of its results, except for results in `kept`, are added
    to `names`.
    """
    for number, step in enumerate(steps):
        name = layer_out(index) if step is steps[-1] else f"layer_{index}_{number}_{step.type}"
        read = set(reads(step))
        # Weights keep their order in the program, which is also their order in the weight file.
        yield from (_copied(left.pop(weight)) for weight in [each for each in left if each in read])
        names |= {old: new for old, new in _results(step, name).items() if old not in kept}
        yield from _written(step, name, constants, names)


def _results(step: Any, name: str) -> dict[str, str]:
    """Return new names of an operation's results, by the old names."""
    if len(step.outputs) == 1:
        return {step.outputs[0].name: name}
    return {output.name: f"{name}_{i}" for i, output in enumerate(step.outputs)}


def _written(step: Any, name: str, constants: Named, names: Mapping[str, str]) -> Iterator[Any]:
    """Yield an operation called `name`, after its constants."""
    copy = _copied(step)
    for parameter, argument in _arguments(copy):
        if argument.name in constants:
            own = _copied(constants[argument.name])
            own.outputs[0].name = argument.name = f"{name}_{parameter}"
            _call(own, argument.name)
            yield own
    _rename(copy, names)
    _call(copy, name)
    yield copy


def _copied(operation: Any) -> Any:
    copy = type(operation)()
    copy.CopyFrom(operation)
    return copy


def _arguments(operation: Any) -> Iterator[tuple[str, Any]]:
    """Return the named values that an operation reads, each with its parameter, numbered if it has several."""
    for key in sorted(operation.inputs):
        arguments = operation.inputs[key].arguments
        for i, argument in enumerate(arguments):
            if argument.WhichOneof("binding") == "name":
                yield (key if len(arguments) == 1 else f"{key}_{i}"), argument


def _rename(operation: Any, names: Mapping[str, str]) -> None:
    """Rename the values that an operation reads and returns."""
    for _, argument in _arguments(operation):
        argument.name = names.get(argument.name, argument.name)
    for output in operation.outputs:
        if output.name in names:
            output.name = names[output.name]
            _call(operation, output.name)


def _call(operation: Any, name: str) -> None:
    """Set an operation's own name."""
    operation.attributes["name"].immediateValue.tensor.strings.values[0] = name
