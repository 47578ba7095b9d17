"""Which operations of a program belong to which layer, told by the weights and states that they read.

Between two layers there is one value that everything after it depends on and nothing before it outlives: the residual
stream. So a layer ends at the last such value before the next layer's first weight or state is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

from shardmill.convert.template.pattern import REMEDY, StampError

STREAM = "x"  # the input that the first layer reads
WEIGHT = re.compile(r"layers_(\d+)_")  # how the name of a layer's weight begins
STATE = re.compile(r"[a-z]_(\d+)")


def reads(operation: Any) -> list[str]:
    """The names that an operation reads, in the order of its parameters' names."""
    arguments = (argument for key in sorted(operation.inputs) for argument in operation.inputs[key].arguments)
    return [argument.name for argument in arguments if argument.WhichOneof("binding") == "name"]


def by_layer(steps: Sequence[Any], weights: Collection[str], states: Collection[str]) -> dict[int, Sequence[Any]]:
    """The operations of each layer by its index in the model.

    Args:
        steps: operations in order, without constants and without those that depend on neither stream, state nor weight.
        weights: names of the program's weights.
        states: names of its states.

    Raises:
        StampError: where more than one value leads from a layer to the next.
    """
    first: dict[int, int] = {}  # place of the first step that reads what belongs to a layer
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
    """Places of the operations with one result that outlives all before it."""
    last = {name: place for place, step in enumerate(steps) for name in reads(step)}
    return list(_places(steps, last))


def _places(steps: Sequence[Any], last: dict[str, int]) -> Iterator[int]:
    """As `_joints`, given the place at which each value is read last."""
    open_until = last[STREAM]
    for place, step in enumerate(steps):
        if open_until <= place and len(step.outputs) == 1:
            yield place
        open_until = max([open_until, *(last.get(output.name, place) for output in step.outputs)])
