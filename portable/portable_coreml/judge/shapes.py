"""The shapes of a function's values, given the shapes of its inputs, without weights and without computing.

Kernels run on torch's "meta" tensors, which have a shape and a type but no data; small values that depend on shapes
alone are computed, for other shapes may depend on them. Where a shape depends on data, it is not known.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import ExecutionError, ProgramError
from portable_coreml.files.read_proto import element_count
from portable_coreml.program import Binding, Blob, Function, Named, Op, StateType, TensorType, Value
from portable_coreml.run.lower import to_held
from portable_coreml.run.lowered import MAX_ELEMENTS, check_number, check_shape, without_data
from portable_coreml.run.ops import Kernel, Param, find_kernel

Shape = tuple[int, ...]
_COMPUTED_ELEMENTS = 4096  # larger values are not shapes
STATE_OPS = ("read_state", "write_state")
_STRICT = ("concat", "stack")  # refused by Core ML where default shapes don't fit (test_stack_dynamic_range_dim)
_MIXED = ("matmul",)  # of floats and integers coremltools declares the type of the one that is no constant


class _Unknown(Exception):
    """An argument whose value or shape depends on data."""


def infer_shapes(function: Function, inputs: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
    """Return name -> shape, for every value whose shape follows from the shapes of `inputs`.

    Raises ProgramError that names the operation if it can't take its shapes. For shapes that are flexible in the
    program only the operations in _STRICT raise: coremltools' tests load programs whose default shapes fit no linear
    layer, and predict with other shapes.
    """
    env: dict[str, Any] = {}
    flexible = {item.name for item in _values(function) if _is_flexible(item)}
    for item in function.inputs:
        kind = item.type.wrapped if isinstance(item.type, StateType) else item.type
        assert isinstance(kind, TensorType)
        env[item.name] = _parameter(item.name, inputs.get(item.name, kind.shape), kind.dtype)
    for op in function.block.ops:
        try:
            results = _results(op, env, op.kind not in _STRICT and not flexible.isdisjoint(_names(op)))
        except ExecutionError as error:
            shown = ", ".join(f"{name} {list(shape)}" for name, shape in inputs.items())
            raise ProgramError(f"with inputs {shown}, {error}") from error
        for out, value in zip(op.outputs, results, strict=True):
            env[out.name] = value if value is not None else _declared(out)
    return {name: tuple(value.shape) for name, value in env.items() if isinstance(value, Tensor)}


def _values(function: Function) -> Iterator[Named]:
    yield from function.inputs
    for op in function.block.ops:
        yield from op.outputs


def _is_flexible(item: Named) -> bool:
    return isinstance(item.type, TensorType) and (item.type.variadic or None in item.type.shape)


def _names(op: Op) -> set[str]:
    return {binding for bindings in op.inputs.values() for binding in bindings if isinstance(binding, str)}


def _parameter(name: str, shape: Sequence[int | None], dtype: str) -> Tensor | None:
    known = [extent for extent in shape if extent is not None]
    if math.prod(known) > MAX_ELEMENTS:
        raise ProgramError(f"input '{name}' of shape {known} is larger than {MAX_ELEMENTS} elements")
    return _ghost(known, dtype) if len(known) == len(shape) else None


def _ghost(shape: Sequence[Any], dtype: str) -> Tensor:
    return torch.empty(list(shape), dtype=BY_NAME[dtype].torch, device="meta")


def _declared(out: Named) -> Tensor | None:
    kind = out.type
    if not isinstance(kind, TensorType) or kind.dtype == "string" or kind.variadic or None in kind.shape:
        return None
    element_count(kind)
    return _ghost(kind.shape, kind.dtype)


def _results(op: Op, env: Mapping[str, Any], lenient: bool) -> Sequence[Any]:
    """Return an operation's results: meta tensors, small computed ones, literals, or None if nothing is known.

    `lenient`: if a kernel can't take the shapes, its results are unknown.
    """
    nothing = [None] * len(op.outputs)
    if op.kind == "const":
        value = op.attributes.get("val") or next(iter(op.inputs.get("val", ())), None)
        return [_literal(value)] if isinstance(value, Value) else nothing
    if op.kind == "read_state":
        return [env.get(str(op.inputs["input"][0]))] if op.inputs.get("input") else nothing
    kernel = None if op.blocks or op.kind in STATE_OPS else find_kernel(op.kind)
    if not kernel or op.kind.startswith("constexpr_") or not all(isinstance(o.type, TensorType) for o in op.outputs):
        return nothing
    try:
        arguments = [_argument(param, op.inputs.get(param.name, ()), env) for param in kernel.params]
        results = _call(kernel, arguments)
        if any(isinstance(result, Tensor) and not result.numel() for result in results):
            return nothing  # a slice from behind the end, which Core ML does not refuse either
        check_number(results, op.outputs)
        for out, result in zip(op.outputs, results, strict=True):
            if isinstance(out.type, TensorType):
                check_shape(result, out.type, out.name)
                if op.kind not in _MIXED:
                    _check_kind(result, out.type, out.name)
        return results
    except _Unknown:
        return nothing
    except Exception as error:
        if _tells_nothing(error) or (lenient and not isinstance(error, ExecutionError)):
            return nothing
        line = (str(error).splitlines() or [""])[0]
        line = line if isinstance(error, (RuntimeError, ValueError)) and line else f"{type(error).__name__} {line}"
        name = op.outputs[0].name if op.outputs else op.name
        raise ExecutionError(f"operation '{op.kind}' (output '{name}') fails: {line}") from error


def _check_kind(result: Tensor, declared: TensorType, name: str) -> None:
    """Raise ExecutionError if floats are declared as integers, or integers as floats."""
    dtype = BY_NAME[declared.dtype].torch
    if result.is_floating_point() != dtype.is_floating_point:
        raise ExecutionError(f"value '{name}' is declared {declared.dtype}, it is computed as {result.dtype}")


def _tells_nothing(error: Exception) -> bool:
    """Return whether a kernel failed by reading a meta tensor, or by an index from behind the end of an axis.

    Core ML refuses neither (coremltools' test_tensor_assign_complex_slice).
    """
    if isinstance(error, (NotImplementedError, IndexError)):
        return True
    return not isinstance(error, ExecutionError) and "meta" in str(error)


def _literal(value: Value) -> Any:
    """Return a literal's tensor, without data if it is in a weight file; a string or list as it stands."""
    if not isinstance(value.type, TensorType) or value.type.dtype == "string":
        return value
    element_count(value.type)
    if isinstance(value.data, Blob):
        return _ghost(value.type.shape, value.type.dtype)
    return to_held(value.data, value.type.dtype)  # type: ignore[arg-type]


def _argument(param: Param, bindings: Sequence[Binding], env: Mapping[str, Any]) -> Any:
    if not bindings:
        if param.default is inspect.Parameter.empty:
            raise _Unknown
        return param.default
    values = [env.get(b) if isinstance(b, str) else _literal(b) for b in bindings]
    if any(value is None for value in values):
        raise _Unknown
    if param.kind == "plain":
        plain = [_plain(value) for value in values]
        return plain[0] if len(plain) == 1 else plain
    if not all(isinstance(value, Tensor) for value in values):
        raise _Unknown
    return values if param.kind == "tensors" else values[0]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_meta:
        return value.tolist()
    if isinstance(value, Value) and not isinstance(value.data, (Blob, tuple)) and hasattr(value.data, "tolist"):
        return value.data.tolist()
    raise _Unknown


def _call(kernel: Kernel, arguments: Sequence[Any]) -> Sequence[Any]:
    """Return a kernel's results: computed if all its tensors are, and the results are small; otherwise meta tensors."""
    tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    if kernel.shape_only:
        return _several(kernel.call(*arguments))
    with torch.device("meta"):
        ghosts = _several(kernel.call(*(without_data(a) for a in arguments)))
    small = sum(math.prod(g.shape) for g in ghosts) <= _COMPUTED_ELEMENTS
    if small and not kernel.impure and not any(t.is_meta for t in tensors):
        return _several(kernel.call(*arguments))
    return ghosts


def _several(results: Any) -> Sequence[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]
