"""Puts each matrix of an INT8 program into the form that it shall have, as coremltools would have made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmill.convert.template.program import main_block
from shardmill.forms.form import INT8, Form, form
from shardmill.models.contract import stem

HALF, QUANTIZED, PALETTIZED = "_to_fp16", "_to_fp16_quantized", "_to_fp16_palettized"


def reform(spec: Any, forms: Mapping[str, str]) -> None:
    """Changes a program in place.

    Args:
        spec: a program whose matrices are all INT8.
        forms: of its matrices, by their paths.
    """
    wanted = {f"{stem(path)}{QUANTIZED}": form(name) for path, name in forms.items() if name != INT8}
    renamed: dict[str, str] = {}
    for operation in main_block(spec).operations:
        old = operation.outputs[0].name if operation.outputs else ""
        if old in wanted:
            _reform(operation, wanted[old], old.removesuffix(QUANTIZED))
            renamed[old] = operation.outputs[0].name
            continue
        for key in operation.inputs:
            for argument in operation.inputs[key].arguments:
                if argument.name in renamed:
                    argument.name = renamed[argument.name]


def _reform(operation: Any, wanted: Form, name: str) -> None:
    """Changes the operation that expands a matrix of INT8."""
    if wanted.kind == "int":
        _retyped(operation.inputs["data"].arguments[0].value, "INT4")
        return
    data = _copied(operation.inputs["data"].arguments[0].value)
    lut = _copied(operation.inputs["scale"].arguments[0].value)
    operation.ClearField("inputs")
    if wanted.kind == "fp16":
        operation.type = "const"
        _retyped(data, "FLOAT16")
        operation.attributes["val"].CopyFrom(data)
        _call(operation, f"{name}{HALF}")
        return
    operation.type = "constexpr_lut_to_dense"
    _retyped(data, f"UINT{wanted.bits}")
    rows = data.type.tensorType.dimensions[0].constant.size
    _reshaped(lut, (wanted.tables(rows), *[1] * (data.type.tensorType.rank - 1), 2**wanted.bits, 1))
    for key, value in (("indices", data), ("lut", lut)):
        operation.inputs[key].arguments.add().value.CopyFrom(value)
    _call(operation, f"{name}{PALETTIZED}")


def _copied(value: Any) -> Any:
    copy = type(value)()
    copy.CopyFrom(value)
    return copy


def _retyped(value: Any, dtype: str) -> None:
    """Sets the type of the numbers of a protobuf value."""
    from coremltools.proto import MIL_pb2

    value.type.tensorType.dataType = getattr(MIL_pb2, dtype)


def _reshaped(value: Any, shape: tuple[int, ...]) -> None:
    """Sets the shape of a protobuf value."""
    kind = value.type.tensorType
    kind.rank = len(shape)
    del kind.dimensions[:]
    for size in shape:
        kind.dimensions.add().constant.size = size


def _call(operation: Any, name: str) -> None:
    """Sets the name of an operation and of its result."""
    operation.outputs[0].name = name
    operation.attributes["name"].immediateValue.tensor.strings.values[0] = name
