"""Writes a program as MIL text, the `model.mil` of a compiled bundle, the way Apple's compiler does.

Verified byte for byte (but for the buildInfo line) on bundles of specification 6 and 7. Specification 8 keeps their
form, whatever the operation set (FluidInference/mobius, KokoroNoise, coremlc 3520). From specification 9 on it is
`program(1.3)` with bare scalar types; that form, list literals and both kinds of flexible shapes follow bundles
of coremlc 3520 and 3600 published with rebeckerspecialties/mlmodelc-export. States and nested blocks have no public
sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from portable_coreml import program as ir
from portable_coreml.errors import ProgramError
from portable_coreml.files.features import Feature

OPSETS = {"CoreML5": "ios15", "CoreML6": "ios16", "CoreML7": "ios17", "CoreML8": "ios18", "CoreML9": "ios26"}
_FIRST_BARE_SPEC = 9
_INDENT = 12
_COMPILER = {"coremlc-component-MIL": "shardmill-portable", "coremlc-version": "1"}
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"})


def write_text(program: ir.Program, spec_version: int, features: Mapping[str, Sequence[Feature]]) -> str:
    """Return MIL text of a program. `features`: the described inputs of each function, for its flexible shapes."""
    style = Style(bare=spec_version >= _FIRST_BARE_SPEC)
    parts = [f"program({'1.3' if style.bare else '1.0'})\n", f"[{style.program_attributes(program)}]\n", "{\n"]
    for name in sorted(program.functions):
        parts.extend(style.function(program.functions[name], features.get(name, ())))
    return "".join([*parts, "}"])


def _quoted(text: str) -> str:
    """Return a string literal."""
    return '"' + text.translate(_ESCAPES) + '"'


def float_text(value: float) -> str:
    """Return C99 hexadecimal notation without trailing zeros."""
    if value != value or value in (float("inf"), float("-inf")):
        return repr(value)
    mantissa, exponent = value.hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}p{exponent}"


class Style:
    """One of the two dialects: scalars as `tensor<int32, []>(1)`, or bare as `int32(1)`."""

    def __init__(self, bare: bool) -> None:
        self.bare = bare

    def type(self, kind: ir.Type) -> str:
        if isinstance(kind, ir.TensorType):
            if self.bare and not kind.shape and not kind.variadic:
                return kind.dtype
            extents = ["?" if d is None else str(d) for d in kind.shape]
            extents = [*extents[:-1], "..."] if kind.variadic else extents  # no public sample of Apple's has one
            return f"tensor<{kind.dtype}, [{', '.join(extents)}]>"
        if isinstance(kind, ir.StateType):
            return f"state<{self.type(kind.wrapped)}>"
        if isinstance(kind, ir.ListType):
            return f"list<{self.type(kind.element)}, {'?' if kind.length is None else kind.length}>"
        if isinstance(kind, ir.DictType):
            return f"dict<{self.type(kind.key)}, {self.type(kind.value)}>"
        return f"tuple<{', '.join(self.type(item) for item in kind.elements)}>"

    def value(self, value: ir.Value) -> str:
        """Return a literal with its type."""
        return f"{self.type(value.type)}({self.inner(value)})"

    def inner(self, value: ir.Value) -> str:
        """Return a literal without its type."""
        if isinstance(value.data, ir.Blob):
            path = self.value(ir.Value(ir.TensorType("string"), np.array(value.data.path, np.object_)))
            return f"BLOBFILE(path = {path}, offset = {self.type(ir.TensorType('uint64'))}({value.data.offset}))"
        if isinstance(value.data, np.ndarray):
            return nested(value.data)
        if isinstance(value.data, ir.Pairs):
            pairs = sorted((self.inner(k), self.inner(v)) for k, v in value.data.items)
            return "{" + ", ".join(f"{{{k}, {v}}}" for k, v in pairs) + "}"
        items = ", ".join(self.inner(item) for item in value.data)
        return f"({items})" if isinstance(value.type, ir.TupleType) else f"[{items}]"

    def binding(self, binding: ir.Binding) -> str:
        return binding if isinstance(binding, str) else self.value(binding)

    def argument(self, bindings: Sequence[ir.Binding]) -> str:
        items = [self.binding(item) for item in bindings]
        return items[0] if len(items) == 1 else f"({', '.join(items)})"

    def named(self, items: Sequence[ir.Named]) -> str:
        return ", ".join(f"{self.type(item.type)} {item.name}" for item in items)

    def attributes(self, attributes: Mapping[str, ir.Value]) -> str:
        return ", ".join(f"{key} = {self.value(attributes[key])}" for key in sorted(attributes))

    def program_attributes(self, program: ir.Program) -> str:
        text = ir.TensorType("string")
        info = dict(_COMPILER)
        recorded = program.attributes.get("buildInfo")
        for key, value in recorded.data.items if recorded is not None and isinstance(recorded.data, ir.Pairs) else ():
            info[_plain(key)] = _plain(value)
        pairs = tuple((_string(key), _string(info[key])) for key in sorted(info))
        return self.attributes({**program.attributes, "buildInfo": ir.Value(ir.DictType(text, text), ir.Pairs(pairs))})

    def function(self, function: ir.Function, features: Sequence[Feature]) -> Iterator[str]:
        if function.opset not in OPSETS:
            raise ProgramError(f"function '{function.name}': operation set '{function.opset}' is not known")
        inputs = sorted(function.inputs, key=lambda item: item.name)
        attributes = dict(function.attributes)
        flexible = _flexible_shapes(features)
        if flexible is not None:
            attributes["FlexibleShapeInformation"] = flexible
        suffix = f" [{self.attributes(attributes)}]" if attributes else ""
        yield f"    func {function.name}<{OPSETS[function.opset]}>({self.named(inputs)}){suffix} {{\n"
        yield from self.body(function.block, _INDENT)
        yield f"{' ' * (_INDENT - 4)}}} -> ({', '.join(function.block.outputs)});\n"

    def body(self, block: ir.Block, indent: int) -> Iterator[str]:
        for op in block.ops:
            yield from self.op(op, indent)

    def op(self, op: ir.Op, indent: int) -> Iterator[str]:
        arguments = ", ".join(f"{key} = {self.argument(op.inputs[key])}" for key in sorted(op.inputs))
        target = f"{self.named(op.outputs)} = " if op.outputs else ""
        attributes = f"[{self.attributes(op.attributes)}]" if op.attributes else ""
        line = f"{' ' * indent}{target}{op.kind}({arguments}){attributes}"
        if not op.blocks:
            yield f"{line};\n"
            return
        yield line
        for block in op.blocks:
            yield f" ({self.named(block.inputs)}) {{\n"
            yield from self.body(block, indent + 4)
            yield f"{' ' * indent}}} -> ({', '.join(block.outputs)})"
        yield ";\n"


def nested(array: np.ndarray) -> str:
    """Return an array's values in nested brackets, a scalar without."""
    if array.ndim == 0:
        return _leaf(array.dtype.kind, array[()])
    if array.ndim == 1:
        kind = array.dtype.kind
        return "[" + ", ".join(_leaf(kind, item) for item in array.tolist()) + "]"
    return "[" + ", ".join(nested(item) for item in array) + "]"


def _leaf(kind: str, item: Any) -> str:
    if kind == "f":
        return float_text(float(item))
    if kind == "b":
        return "true" if item else "false"
    return _quoted(str(item)) if kind == "O" else str(item)


def _plain(value: ir.Value) -> str:
    return str(value.data[()]) if isinstance(value.data, np.ndarray) else ""


def _string(text: str) -> ir.Value:
    return ir.Value(ir.TensorType("string"), np.array(text, np.object_))


def _shape(shape: Sequence[int]) -> ir.Value:
    return ir.Value(ir.TensorType("int32", (None,)), np.array(shape, np.int32))


def _flexible_shapes(features: Sequence[Feature]) -> ir.Value | None:
    """Return the function attribute that the compiler derives from the described inputs: default and allowed shapes."""
    ranged = [f for f in sorted(features, key=lambda f: f.name) if f.ranges]
    listed = [f for f in sorted(features, key=lambda f: f.name) if f.choices]
    chosen = ranged or listed
    if not chosen:
        return None
    text, shape = ir.TensorType("string"), ir.TensorType("int32", (None,))
    defaults = ir.Value(ir.DictType(text, shape), ir.Pairs(tuple((_string(f.name), _shape(f.shape)) for f in chosen)))
    name, allowed = ("RangeDims", _range_dims(ranged)) if ranged else ("EnumeratedShapes", _enumerated(listed))
    entries = [
        ir.Value(ir.TupleType((text, v.type)), (_string(k), v))
        for k, v in (("DefaultShapes", defaults), (name, allowed))
    ]
    return ir.Value(ir.TupleType(tuple(e.type for e in entries)), tuple(entries))


def _range_dims(features: Sequence[Feature]) -> ir.Value:
    pair = ir.TensorType("int32", (2,))
    rows = []
    for feature in features:
        bounds = [np.array([low, -1 if high is None else high], np.int32) for low, high in feature.ranges]
        rows.append((_string(feature.name), ir.Value(ir.ListType(pair), tuple(ir.Value(pair, b) for b in bounds))))
    return ir.Value(ir.DictType(ir.TensorType("string"), ir.ListType(pair)), ir.Pairs(tuple(rows)))


def _enumerated(features: Sequence[Feature]) -> ir.Value:
    """Return one entry per allowed combination.

    The compiler's keys are eight hexadecimal digits of unknown origin; ours
    only differ from each other.
    """
    text, shape = ir.TensorType("string"), ir.TensorType("int32", (None,))
    rows = []
    for index in range(len(features[0].choices)):
        picked = [(f.name, f.choices[index]) for f in features if index < len(f.choices)]
        key = f"{zlib.crc32(repr(picked).encode()):08x}"
        rows.append(
            (
                _string(key),
                ir.Value(ir.DictType(text, shape), ir.Pairs(tuple((_string(n), _shape(s)) for n, s in picked))),
            )
        )
    return ir.Value(ir.DictType(text, ir.DictType(text, shape)), ir.Pairs(tuple(rows)))
