"""Whether two programs are the same, value by value: what a compiled bundle must be to its package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from portable_coreml.program import Block, Function, Named, Pairs, Program, Value

ADDED = "FlexibleShapeInformation"  # the compiler derives it from the description


def differences(one: Program, two: Program) -> Iterator[str]:
    """What differs between two programs, but for what compiling adds: buildInfo, the attribute for flexible shapes."""
    if list(one.functions) != list(two.functions):
        yield f"functions {list(one.functions)} and {list(two.functions)}"
        return
    for name, function in one.functions.items():
        yield from _functions(name, function, two.functions[name])


def _functions(name: str, one: Function, two: Function) -> Iterator[str]:
    if (one.opset, _by_name(one)) != (two.opset, _by_name(two)):  # the text sorts them
        yield f"{name}: {one.opset} {one.inputs} and {two.opset} {two.inputs}"
    yield from _values(name, one.attributes, {k: v for k, v in two.attributes.items() if k != ADDED})
    yield from _blocks(name, one.block, two.block)


def _by_name(function: Function) -> list[Named]:
    return sorted(function.inputs, key=lambda item: item.name)


def _blocks(name: str, one: Block, two: Block) -> Iterator[str]:
    if (one.inputs, one.outputs, len(one.ops)) != (two.inputs, two.outputs, len(two.ops)):
        yield f"{name}: blocks of {len(one.ops)} and {len(two.ops)} operations, {one.outputs} and {two.outputs}"
        return
    for a, b in zip(one.ops, two.ops, strict=True):
        where = f"{name}, {a.kind} '{a.name}'"
        if (a.kind, a.outputs, len(a.blocks)) != (b.kind, b.outputs, len(b.blocks)):
            yield f"{where}: {a.outputs} and {b.kind} {b.outputs}"
            continue
        yield from _values(where, a.attributes, b.attributes)
        yield from _bindings(where, a.inputs, b.inputs)
        for first, second in zip(a.blocks, b.blocks, strict=True):
            yield from _blocks(where, first, second)


def _bindings(where: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[str]:
    if {k: len(v) for k, v in one.items()} != {k: len(v) for k, v in two.items()}:
        yield f"{where}: arguments {sorted(one)} and {sorted(two)}"
        return
    for key, bound in one.items():
        for a, b in zip(bound, two[key], strict=True):
            if not same_value(a, b):
                yield f"{where}: argument {key} is {a!r} and {b!r}"


def _values(where: str, one: Mapping[str, Value], two: Mapping[str, Value]) -> Iterator[str]:
    for key in sorted({*one, *two}):
        if key not in one or key not in two or not same_value(one[key], two[key]):
            yield f"{where}: attribute {key} is {one.get(key)!r} and {two.get(key)!r}"


def same_value(one: Any, two: Any) -> bool:
    """Two bindings or literals: the same names, types, bits and order, but for the order of a dictionary."""
    if not isinstance(one, Value) or not isinstance(two, Value):
        return bool(one == two)
    if one.type != two.type or type(one.data) is not type(two.data):
        return False
    if isinstance(one.data, np.ndarray) and isinstance(two.data, np.ndarray):
        return one.data.dtype == two.data.dtype and one.data.shape == two.data.shape and _same_bits(one.data, two.data)
    if isinstance(one.data, Pairs) and isinstance(two.data, Pairs):
        return len(one.data.items) == len(two.data.items) and all(
            any(same_value(k, o) and same_value(v, w) for o, w in two.data.items) for k, v in one.data.items
        )
    if isinstance(one.data, tuple) and isinstance(two.data, tuple):
        return len(one.data) == len(two.data) and all(map(same_value, one.data, two.data))
    return bool(one.data == two.data)


def _same_bits(one: np.ndarray, two: np.ndarray) -> bool:
    if one.dtype.kind == "O":
        return bool((one == two).all())
    nan = np.isnan(one) & np.isnan(two) if one.dtype.kind == "f" else np.zeros(one.shape, bool)
    return bool(((one == two) & (np.signbit(one) == np.signbit(two)) | nan).all()) if one.size else True
