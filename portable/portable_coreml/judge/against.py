"""Where two programs part: a program against another, an exported program of PyTorch, or recorded arrays.

Both compute in fp32, from the same inputs. A value of one has a counterpart in the other if some value there holds the
same numbers, in the same order or with axes moved. If most names of one are names of the other too, the value of the
same name is looked at first, and axes must not have moved. Programs part at an operation whose result has no
counterpart although all that it takes has one, and from which an output follows that differs. So the same mathematics
in other operations, which come together again, is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from portable_coreml.errors import InputError
from portable_coreml.judge.drift import gap
from portable_coreml.judge.traces import Trace, norm
from portable_coreml.program import Op, Value

_CANDIDATES = 16  # values of one size that are compared, the nearest norms first
_SHOWN = 6  # numbers of an array that a line can hold


@dataclass(frozen=True)
class Pair:
    """A value and its counterpart.

    Attributes:
        name: the value's name.
        kind: the type of its operation.
        other: the counterpart's name, or the name of what differs from it; "" if nothing is known.
        difference: as `drift.gap`.
        same: whether the difference is within the bound.
    """

    name: str
    kind: str
    other: str
    difference: float
    same: bool


@dataclass(frozen=True)
class Parting:
    """Where two programs part.

    Attributes:
        name: the operation of the first, by its result; "" if only the second has one here.
        kind: its type.
        other: the operation of the second, or "".
        other_kind: its type.
        difference: of their results; None if they are not the same operation.
        what: what is not the same about them.
    """

    name: str
    kind: str
    other: str
    other_kind: str
    difference: float | None
    what: str


@dataclass(frozen=True)
class Against:
    """How two programs compare.

    Attributes:
        other: the file of the second one.
        bound: the difference that is allowed.
        outputs: the pairs of outputs.
        partings: where they part, in program order. If all outputs are the same, these are differences inside alone,
            which may be other operations for the same thing.
        rows: every value of the first program, in program order.
        alone: values of the second program that have no counterpart.
    """

    other: str
    bound: float
    outputs: tuple[Pair, ...]
    partings: tuple[Parting, ...]
    rows: tuple[Pair, ...]
    alone: int

    @property
    def same(self) -> bool:
        return all(pair.same for pair in self.outputs)


def compare(one: Trace, two: Trace, bound: float) -> Against:
    """Return where two programs part whose values differ by more than `bound`. Raises InputError without outputs."""
    trusted = 2 * sum(name in two.values for name in one.values) >= len(one.values) or two.recorded
    pairs = {name: _counterpart(one, name, two, bound, trusted) for name in one.values}
    back = {name: _counterpart(two, name, one, bound, trusted) for name in two.values}
    outputs = tuple(_outputs(one, two, bound))
    if not outputs:
        raise InputError(
            f"{two.path}: no array in it has the name of a value of {one.path}, such as '{one.outputs[0]}'"
        )
    differing = [pair for pair in outputs if not pair.same]
    inside = ([pair.name for pair in known.values() if not pair.same] for known in (pairs, back))
    starts = ([p.name for p in differing], [p.other for p in differing]) if differing or two.recorded else tuple(inside)
    ours = _roots(one, starts[0], pairs, two.recorded)
    theirs = _roots(two, starts[1], back, False) if not two.recorded else ours
    return Against(
        two.path,
        bound,
        outputs,
        tuple(_partings(one, two, ours, theirs, bound)),
        tuple(pairs[name] for name in one.values if one.kinds[name] != "input"),
        sum(not pair.same for name, pair in back.items()),
    )


def _counterpart(one: Trace, name: str, two: Trace, bound: float, trusted: bool) -> Pair:
    value, kind = one.values[name], one.kinds[name]
    named = name in two.values and (trusted or kind == "input")
    difference = gap(value, two.values[name]) if named else float("inf")
    best = Pair(name, kind, name if named else "", difference, kind == "input" or difference <= bound)
    if best.same or two.recorded or (named and one.takes.get(name) == two.takes.get(name)):
        return best  # what has the name and takes the same is the same operation, whatever else has these numbers
    size = norm(value)
    near = sorted((abs(its - size), other) for its, other in two.by_size.get(value.numel(), ()))
    for distance, other in near[:_CANDIDATES]:
        if distance > bound * size:
            break
        difference = gap(value, two.values[other]) if named else _moved_gap(value, two.values[other], bound)
        if difference <= bound and (difference < best.difference or not best.same):
            best = Pair(name, kind, other, difference, True)
    return best


def _moved_gap(one: Tensor, two: Tensor, bound: float) -> float:
    """Return the difference of two values of one size, with the axes of the second as they fit the first best.

    Where the axes of one are products of axes of the other, the same numbers in any order count as the same.
    """
    least = gap(one, two)
    shapes = [[size for size in value.shape if size != 1] for value in (one, two)]
    if least <= bound or shapes[0] == shapes[1]:
        return least
    if sorted(shapes[0]) == sorted(shapes[1]):
        bare = two.reshape(shapes[1])
        turned = (bare.permute(axes) for axes in permutations(range(bare.ndim)))
        return min((gap(one, other) for other in turned if list(other.shape) == shapes[0]), default=least)
    return min(least, gap(*(value.reshape(-1).double().sort().values for value in (one, two))))


def _outputs(one: Trace, two: Trace, bound: float) -> Iterator[Pair]:
    """Yield pairs of outputs: by name, the others in their order; of recorded arrays all that have a value's name."""
    if two.recorded:
        names = [(name, name) for name in one.values if name in two.values and one.kinds[name] != "input"]
    else:
        names = [(name, name) for name in one.outputs if name in two.outputs]
        rest = [[name for name in trace.outputs if (name, name) not in names] for trace in (one, two)]
        names += zip(*rest, strict=False)
        if len(one.outputs) != len(two.outputs):
            counts = f"{len(one.outputs)} outputs, {two.path} has {len(two.outputs)}"
            raise InputError(f"{one.path}: it has {counts}; programs with different outputs can't be compared")
    for name, other in names:
        mine, its = one.values[name], two.values[other]
        difference = _moved_gap(mine, its, bound) if mine.numel() == its.numel() else float("inf")
        yield Pair(name, one.kinds[name], other, difference, difference <= bound)


def _roots(trace: Trace, differing: list[str], pairs: Mapping[str, Pair], sparse: bool) -> list[str]:
    """Return the first values on the way to outputs that differ whose own inputs all have counterparts.

    `sparse`: not every value was recorded; a value of which nothing is known is neither the same nor different.
    """
    region, todo = set(differing), list(differing)
    while todo:
        for name in trace.takes.get(todo.pop(), ()):
            if name not in region and not pairs[name].same:
                region.add(name)
                todo.append(name)
    roots, after = [], set()
    for name in trace.values:  # in program order
        if name in region:
            differs = not sparse or bool(pairs[name].other)
            if any(taken in after for taken in trace.takes.get(name, ())):
                after.add(name)
            elif differs:
                roots.append(name)
                after.add(name)
    return roots


def _partings(one: Trace, two: Trace, ours: list[str], theirs: list[str], bound: float) -> Iterator[Parting]:
    """Yield the roots of both programs in pairs: of one name, of one type and the same inputs, or else in their order.

    Where an operation's result happens to be elsewhere in the other program too, what takes it seemed to differ first.
    """
    sides = [(name, name) for name in ours if name in theirs]
    done = {name for name, _ in sides}, {name for name, _ in sides}
    for name in ours:
        twin = (
            "" if name in done[0] else _twin(one, name, two, [other for other in theirs if other not in done[1]], bound)
        )
        if twin:
            sides.append((name, twin))
            done[0].add(name)
            done[1].update([twin, *(other for other in theirs if twin in two.takes.get(other, ()))])
    for other in theirs:
        twin = "" if other in done[1] else _twin(two, other, one, [], bound)
        if twin:
            sides.append((twin, other))
            done[1].add(other)
            done[0].update(name for name in ours if twin in one.takes.get(name, ()))
    left = [name for name in ours if name not in done[0]], [name for name in theirs if name not in done[1]]
    sides += zip_longest(*left, fillvalue="")
    order = {name: place for place, name in enumerate(one.values)}
    for name, other in sorted(sides, key=lambda pair: order.get(pair[0], len(order))):
        kinds = one.kinds.get(name, ""), two.kinds.get(other, "")
        alike = name and other and (name == other or kinds[0] == kinds[1])
        difference = gap(one.values[name], two.values[other]) if alike else None
        what = "; ".join(_unlike(one, name, two, other)) if name and other else "it has no counterpart"
        yield Parting(name, kinds[0], other, kinds[1], difference, what)


def _twin(one: Trace, name: str, two: Trace, first: list[str], bound: float) -> str:
    """Return the operation of another program that is of the same type and takes the same; among `first` if one is."""
    taken = one.takes.get(name, ())
    for other in [*first, *(other for other in two.values if other not in first)]:
        takes = two.takes.get(other, ())
        if two.kinds[other] == one.kinds[name] and len(takes) == len(taken) > 0:
            values = [(one.values[mine], two.values[its]) for mine, its in zip(taken, takes, strict=True)]
            if all(a.numel() == b.numel() and _moved_gap(a, b, bound) <= bound for a, b in values):
                return other
    return ""


def _unlike(one: Trace, name: str, two: Trace, other: str) -> Iterator[str]:
    """Yield what two operations don't have in common: their type, or arguments that are constants."""
    if name not in one.ops or other not in two.ops:
        return
    mine, its = one.ops[name], two.ops[other]
    if mine.kind != its.kind:
        yield f"{mine.kind} here, {its.kind} there"
        return
    for argument in dict.fromkeys([*mine.inputs, *its.inputs]):
        values = [_literal(trace, op, argument) for trace, op in ((one, mine), (two, its))]
        first, second = values
        if first is None and second is None:
            continue
        if first is None or second is None:
            yield f"'{argument}' is a constant of one of them only"
        elif isinstance(first, str) or isinstance(second, str):
            if not (isinstance(first, str) and isinstance(second, str) and first == second):
                yield f"'{argument}' is {_shown(first)} here, {_shown(second)} there"
        elif not np.array_equal(first, second):
            alike = first.shape == second.shape and first.size > _SHOWN
            changed = gap(*(torch.from_numpy(np.array(v, np.float64)) for v in values)) if alike else 0.0
            shown = f"differs by {changed:.2%}" if alike else f"is {_shown(first)} here, {_shown(second)} there"
            yield f"'{argument}' {shown}"


def _literal(trace: Trace, op: Op, argument: str) -> Any:
    """Return an argument's array if it is a constant, the type of what expands it if it is stored otherwise."""
    bindings = op.inputs.get(argument, ())
    if len(bindings) != 1:
        return None
    value = bindings[0]
    producer = trace.ops.get(value) if isinstance(value, str) else None
    if producer is not None:
        if producer.kind.startswith("constexpr_"):
            return producer.kind
        value = producer.attributes.get("val", value) if producer.kind == "const" else value
    return np.asarray(trace.constants(value)) if isinstance(value, Value) and trace.constants is not None else None


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return str(value.tolist()) if value.size <= _SHOWN else f"of shape {list(value.shape)}"
