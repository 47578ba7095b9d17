"""Inputs to judge a program with: seeded arrays within each input's domain, and arrays at the edges of it.

A domain is stated by whoever asks, or follows from what the program does with the input; if neither says anything, it
is assumed, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from portable_coreml.errors import InputError
from portable_coreml.judge.rule import Subject, input_names
from portable_coreml.program import Op, TensorType

Range = tuple[float, float]
# What passes numbers on as they are, or nearly: coremltools casts and reshapes ids, and adds a table's length to
# negative ones, before they select rows.
_PASSES = frozenset({"cast", "reshape", "expand_dims", "squeeze", "transpose", "select", "add", "greater_equal"})
_NOT_NEGATIVE = frozenset({"log", "sqrt", "rsqrt"})  # operations that give NaN for numbers below 0
_COLOURS = (20, 30)  # RGB and BGR, of ColorSpace in FeatureTypes.proto
_TINY, _LARGE = 1e-6, 100.0


@dataclass(frozen=True)
class Domain:
    """What an input is fed with.

    Attributes:
        name: the input's name.
        dtype: its type in the description, or "image": pixels, [1, channels, height, width].
        shape: the shape that it is judged at, the default one.
        kind: "normal" (of variance 1), "positive" (their magnitudes), "range" (between two numbers, both included),
            "ones", "given" (recorded) or "left out" (it has a default).
        why: who or what says so.
        low: the least number of a range.
        high: the largest number of a range.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    why: str
    low: float = 0.0
    high: float = 0.0

    @property
    def assumed(self) -> bool:
        """Return whether neither the program nor anybody else says how large the numbers are."""
        return self.kind in ("normal", "positive")

    @property
    def whole(self) -> bool:
        """Return whether the numbers are whole."""
        return "int" in self.dtype or self.dtype == "image"


def domains(
    subject: Subject, description: Any, stated: Mapping[str, Range], recorded: Collection[str] = ()
) -> tuple[Domain, ...]:
    """Return the domain of each input of a function.

    Args:
        subject: the function.
        description: its ModelDescription or FunctionDescription message.
        stated: ranges by name; names that are no inputs are ignored.
        recorded: inputs of which there are recorded arrays.

    Raises:
        InputError: an input has no default shape, or a range can't hold a number of its type.
    """
    images = {m.name: m.type.imageType for m in description.input if m.type.WhichOneof("Type") == "imageType"}
    made = []
    for feature in subject.inputs:
        name, shape = feature.name, feature.shape or _declared(subject, feature.name)
        domain = Domain(name, feature.dtype, shape, "given", "recorded")
        if name in recorded:
            pass
        elif name in images:
            kind = images[name]
            shape = shape or (1, 3 if int(kind.colorSpace) in _COLOURS else 1, int(kind.height), int(kind.width))
            domain = replace(domain, dtype="image", shape=shape, kind="range", why="pixels", high=255.0)
        elif name in stated:
            domain = _in_range(domain, *stated[name])
        elif feature.optional:
            domain = replace(domain, kind="left out", why=f"it is optional; by default {feature.default or 0.0:g}")
        elif not shape:
            raise InputError(f"input '{name}' has no default shape: record an array of it, and name the file")
        else:
            domain = _used(subject, domain)
        made.append(domain)
    return tuple(made)


def _declared(subject: Subject, name: str) -> tuple[int, ...]:
    kind = subject.types.get(name)
    known = isinstance(kind, TensorType) and not kind.variadic and None not in kind.shape
    return tuple(n or 0 for n in kind.shape) if kind is not None and known else ()


def _in_range(domain: Domain, low: float, high: float) -> Domain:
    if low > high or (domain.whole and math.ceil(low) > math.floor(high)):
        raise InputError(f"input '{domain.name}' is {domain.dtype}: there is no such number from {low:g} to {high:g}")
    return replace(domain, kind="range", why="stated", low=low, high=high)


def _used(subject: Subject, domain: Domain) -> Domain:
    """Return a domain that follows from the operations that take an input."""
    if "mask" in domain.name.lower():
        return replace(domain, kind="ones", why="its name says mask")
    takers = list(_takers(subject, domain.name))
    if "int" in domain.dtype:
        for op, argument in takers:
            table = subject.argument_type(op, "x") if op.kind.startswith("gather") and argument == "indices" else None
            axis = subject.literal(op, "axis")
            rows = None if table is None or not table.shape else table.shape[int(axis[()]) if axis is not None else 0]
            if rows:
                return replace(domain, kind="range", why=f"it selects from {rows} rows", high=rows - 1.0)
        return replace(domain, kind="range", why="assumed: nothing says what it counts", high=1.0)
    if any(op.kind in _NOT_NEGATIVE for op, _ in takers):
        return replace(domain, kind="positive", why="the program takes its logarithm or root")
    return replace(domain, kind="normal", why="assumed: nothing says how large it is")


def _takers(subject: Subject, name: str) -> Iterator[tuple[Op, str]]:
    """Yield the operations that take an input as it is, or nearly, each with the argument by which it does."""
    seen, todo = {name}, [name]
    while todo:
        value = todo.pop()
        for op in subject.consumers.get(value, ()):
            for argument, bindings in op.inputs.items():
                if value in bindings:
                    yield op, argument
            others = [other for other in input_names(op) if other != value and not subject.is_constant(other)]
            if op.kind in _PASSES and all(other in seen for other in others if op.kind == "add"):
                new = [out.name for out in op.outputs if out.name not in seen]
                seen.update(new)
                todo += new


@dataclass(frozen=True)
class Probe:
    """Inputs at an edge.

    Attributes:
        name: the rule of what is found with them.
        words: which inputs they are.
        arrays: by name.
        inside: whether the edge is known to belong to the domain.
    """

    name: str
    words: str
    arrays: Mapping[str, Any]
    inside: bool


def arrays(inputs: Collection[Domain], seed: int, scale: float = 1.0) -> dict[str, Any]:
    """Return seeded arrays by name for all inputs but those that are given or left out.

    Args:
        inputs: their domains.
        seed: of the random numbers.
        scale: multiplies numbers that are not within a range.
    """
    made: dict[str, Any] = {}
    for index, domain in enumerate(inputs):
        rng = np.random.default_rng([seed, index])
        if domain.kind == "range" and domain.whole:
            low, high = math.ceil(domain.low), math.floor(domain.high)
            made[domain.name] = rng.integers(low, high, domain.shape, np.int32, endpoint=True)
        elif domain.kind == "range":
            made[domain.name] = rng.uniform(domain.low, domain.high, domain.shape).astype(np.float32)
        elif domain.assumed:
            numbers = rng.standard_normal(domain.shape) * scale
            made[domain.name] = (np.abs(numbers) if domain.kind == "positive" else numbers).astype(np.float32)
        elif domain.kind == "ones":
            made[domain.name] = np.ones(domain.shape, np.int32 if "int" in domain.dtype else np.float32)
    return made


def probes(inputs: Collection[Domain], seed: int) -> Iterator[Probe]:
    """Yield inputs at the edges: zeros or the number nearest to it, the least and the largest of each domain.

    Where a domain is assumed, the least numbers are far below fp16's normal ones, and the largest a hundred times those
    that are usual; whether they occur, nobody has said.
    """
    fixed = {d.name: _filled(d, min(max(0.0, d.low), d.high)) for d in inputs if d.kind == "range" or d.assumed}
    if not fixed:
        return
    yield Probe(
        "probe-zeros", "inputs of zeros", {**arrays(inputs, seed), **fixed}, all(d.kind != "positive" for d in inputs)
    )
    assumed = any(d.assumed for d in inputs)
    for name, scale in (("probe-least", _TINY), ("probe-largest", _LARGE)):
        edges = {d.name: _filled(d, d.low if scale == _TINY else d.high) for d in inputs if d.kind == "range"}
        words = f"inputs {scale:g} times as large" if assumed else f"the {name.removeprefix('probe-')} inputs"
        yield Probe(name, words, {**arrays(inputs, seed, scale), **edges}, not assumed)


def _filled(domain: Domain, number: float) -> np.ndarray:
    if domain.whole:
        return np.full(domain.shape, min(math.ceil(number), math.floor(domain.high)), np.int32)
    return np.full(domain.shape, number, np.float32)
