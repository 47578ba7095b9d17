"""The normal form of a program: the names and places of a layer's operations follow from the layer's kind.

coremltools numbers the values of a whole program and lets layers share constants. It puts operations that depend only
on the inputs where their results are first used. So a layer's text depends on all layers before it. In normal form,
operations that depend only on inputs other than the residual stream come first, sorted by depth and name. Every other
operation belongs to one piece of the program. A piece is a layer, or the whole of a head, of a group of experts or of
an encoder. A layer reads the residual stream that the layer before it leaves, and possibly the cache of an earlier
layer. A piece's operations keep their order. Each operation has separate constants. A name
consists of the piece's name, the operation's number in the piece, and the operation's type. Weights, inputs, states and
outputs keep their names. Values and arithmetic do not change.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.convert.package import call, copied, main_block, main_function, named_arguments, stored_values
from shardmill.models.adapters import ADAPTER
from shardmill.models.contract import TAP, tap_name

WEIGHT = re.compile(r"layers_(\d+)_")  # how the name of a layer's weight begins
STATE = re.compile(rf"(?:[a-z]|{ADAPTER}[a-z_]+)_(\d+)")  # what belongs to one layer: a cache, rows, an adapter
LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopabcdef")  # no digit of a digest shall be read as a layer's index
Named = Mapping[str, Any]  # operations by the name of their first result
Divide = Callable[[Sequence[Any], Collection[str], Collection[str], str], Mapping[str, Sequence[Any]]]


@dataclass(frozen=True)
class SharedOperation:
    """An operation that depends on the program's inputs only, preceded by its constants."""

    depth: int  # operations on the longest way from an input
    operations: tuple[Any, ...]


@dataclass(frozen=True)
class Normal:
    """A program's operations. The piece P reads the residual stream as P_in and leaves it as P_out."""

    shared: Mapping[str, SharedOperation]  # by name; equal computations have equal names
    weights: Named  # weights that belong to no layer
    pieces: Mapping[str, tuple[Any, ...]]

    def operations(self, stream: str, output: str, taps: Sequence[int] = ()) -> Iterator[Any]:
        """Yield all operations in order, given the names of the program's first input and first result.

        Before each layer of `taps` the stream has the name of an output.
        """
        for name in sorted(self.shared, key=lambda name: (self.shared[name].depth, name)):
            yield from self.shared[name].operations
        left, last = dict(self.weights), [*self.pieces][-1]
        named = {f"layer_{layer - 1}": tap_name(layer) for layer in taps}
        for piece, operations in self.pieces.items():
            left_as = output if piece == last else named.get(piece, f"{piece}_out")
            for operation in operations:
                _rename(operation, {f"{piece}_in": stream, f"{piece}_out": left_as})
                yield from _taken(left, operation)
                yield operation
            stream = left_as


def normal_form(spec: Any, divide: Divide) -> Normal:
    """Return the operations of a program, copied.

    All weights must be references to the weight file, though in the end the program itself holds the shortest.

    Args:
        spec: Model_pb2.Model.
        divide: returns the operations of each piece by the piece's name. It gets the operations in order, without
            constants and without those that depend on neither stream, state nor weight, and the names of the program's
            weights, of its states or the inputs in their place, and of the stream.
    """
    operations, inputs = list(main_block(spec).operations), [value.name for value in main_function(spec).inputs]
    stream = inputs[0]
    states = {state.name for state in spec.description.state} | {name for name in inputs if STATE.fullmatch(name)}
    weights = {op.outputs[0].name: op for op in operations if stored_values(op)}
    constants = {op.outputs[0].name: op for op in operations if op.type == "const" and not stored_values(op)}
    steps = [op for op in operations if op.type != "const" and not stored_values(op)]
    shared, names, moving = _shared(steps, constants, {*inputs} - states - {stream})
    pieces: dict[str, tuple[Any, ...]] = {}
    row_outputs = {name for name in main_block(spec).outputs[1:] if not name.startswith(TAP)}
    left = {name: op for name, op in weights.items() if WEIGHT.match(name)}
    moving = _with_rows_early(moving, row_outputs)
    for piece, its_steps in divide(moving, weights, states, stream).items():
        names[stream] = f"{piece}_in"
        pieces[piece] = tuple(_piece(piece, its_steps, constants, left, names, row_outputs))
        stream = its_steps[-1].outputs[0].name
    return Normal(shared, {name: op for name, op in weights.items() if not WEIGHT.match(name)}, pieces)


def _with_rows_early(steps: Sequence[Any], rows: Collection[str]) -> list[Any]:
    """Return the steps in order, but move each step that only makes rows for the host right after its last operand.

    coremltools puts such steps of all layers at the end.
    """
    used = {name for step in steps for name in _reads(step)}
    late = [step for step in steps if step.outputs and {out.name for out in step.outputs} <= set(rows) - used]
    early = [step for step in steps if not any(step is one for one in late)]
    for step in late:
        made_of = set(_reads(step))
        last = max(place for place, one in enumerate(early) if made_of & {out.name for out in one.outputs})
        early.insert(last + 1, step)
    return early


def _shared(
    steps: list[Any], constants: Named, fixed: Collection[str]
) -> tuple[dict[str, SharedOperation], dict[str, str], list[Any]]:
    """Split operations by whether they depend on `fixed` values only; return the new names of results, too."""
    shared: dict[str, SharedOperation] = {}
    names: dict[str, str] = {}
    depths, moving = dict.fromkeys(fixed, 0), list[Any]()
    for step in steps:
        read = [name for name in _reads(step) if name not in constants]
        if any(name not in depths for name in read):
            moving.append(step)
            continue
        depth, name = 1 + max(depths[name] for name in read), f"shared_{step.type}_{_digest(step, constants, names)}"
        depths |= {output.name: depth for output in step.outputs}
        names |= _results(step, name)
        shared[name] = SharedOperation(depth, tuple(_written(step, name, constants, names)))
    return shared, names, moving


def _digest(step: Any, constants: Named, names: Mapping[str, str]) -> str:
    """Return a digest of an operation's computation, independent of the names in this program."""
    copy = copied(step)
    del copy.attributes["name"]
    for output in copy.outputs:
        output.name = ""
    for _, argument in named_arguments(copy):
        if argument.name in constants:
            argument.value.CopyFrom(constants[argument.name].attributes["val"])
        else:
            argument.name = names.get(argument.name, argument.name)
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()[:8].translate(LETTERS)


def _piece(
    piece: str,
    steps: Sequence[Any],
    constants: Named,
    left: dict[str, Any],
    names: dict[str, str],
    row_outputs: Collection[str],
) -> Iterator[Any]:
    """Yield the operations of a piece.

    The weights of its layer are taken out of `left`. The new names of its results, except for results in `kept`, are
    added to `names`.
    """
    for number, step in enumerate(steps):
        name = f"{piece}_out" if step is steps[-1] else f"{piece}_{number}_{step.type}"
        yield from map(copied, _taken(left, step))
        names |= {old: new for old, new in _results(step, name).items() if old not in row_outputs}
        yield from _written(step, name, constants, names)


def _taken(left: dict[str, Any], step: Any) -> list[Any]:
    """Take the weights out of `left` that an operation reads, in their order in the program and in the weight file."""
    read = set(_reads(step))
    return [left.pop(name) for name in [*left] if name in read]


def _results(step: Any, name: str) -> dict[str, str]:
    """Return new names of an operation's results, by the old names."""
    if len(step.outputs) == 1:
        return {step.outputs[0].name: name}
    return {output.name: f"{name}_{i}" for i, output in enumerate(step.outputs)}


def _written(step: Any, name: str, constants: Named, names: Mapping[str, str]) -> Iterator[Any]:
    """Yield an operation called `name`, after its constants."""
    copy = copied(step)
    for parameter, argument in named_arguments(copy):
        if argument.name in constants:
            constant_copy = copied(constants[argument.name])
            argument.name = f"{name}_{parameter}"
            call(constant_copy, argument.name)
            yield constant_copy
    _rename(copy, names)
    _title(copy, name)
    yield copy


def _rename(operation: Any, names: Mapping[str, str]) -> None:
    """Rename the values that an operation reads and returns."""
    for _, argument in named_arguments(operation):
        argument.name = names.get(argument.name, argument.name)
    for output in operation.outputs:
        if output.name in names:
            output.name = names[output.name]
            _title(operation, output.name)


def _title(operation: Any, name: str) -> None:
    """Set an operation's own name, and no result's."""
    operation.attributes["name"].immediateValue.tensor.strings.values[0] = name


def _reads(operation: Any) -> list[str]:
    """Return the names that an operation reads, in the order of its parameters' names."""
    return [argument.name for _, argument in named_arguments(operation)]
