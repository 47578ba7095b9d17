"""Reads the `mlProgram` of a model specification (protobuf) into the intermediate representation.

Protobuf gives structure but no promise that names, types and sizes agree; whatever does not fit raises ProgramError
naming the value. Weight files are not opened here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from portable_coreml import program as ir
from portable_coreml.dtypes import BY_NUMBER, ScalarType, unpack_bits
from portable_coreml.errors import ProgramError

_MAX_LITERAL_ELEMENTS = 1 << 40  # no file holds more
MAX_RANK = 64
MAX_NESTING = 64  # of blocks, types and values: no real program comes near


def read_program(message: Any) -> ir.Program:
    """Return the program of a `MIL.Program` message. Raises ProgramError where it is not well-formed."""
    functions = {name: _function(name, function) for name, function in sorted(message.functions.items())}
    if not functions:
        raise ProgramError("the model has no function: it is not an ML Program")
    return ir.Program(functions, _values(message.attributes), str(message.version))


def _function(name: str, message: Any) -> ir.Function:
    if message.opset not in message.block_specializations:
        raise ProgramError(f"function '{name}' has no block for its opset '{message.opset}'")
    block = _block(message.block_specializations[message.opset], 0)
    return ir.Function(name, _named(message.inputs), message.opset, block, _values(message.attributes))


def _block(message: Any, depth: int) -> ir.Block:
    if depth > MAX_NESTING:
        raise ProgramError(f"blocks are nested more than {MAX_NESTING} deep")
    ops = tuple(_op(op, depth) for op in message.operations)
    return ir.Block(ops, tuple(message.outputs), _named(message.inputs))


def _op(message: Any, depth: int) -> ir.Op:
    inputs = {key: tuple(_binding(item) for item in arg.arguments) for key, arg in sorted(message.inputs.items())}
    blocks = tuple(_block(block, depth + 1) for block in message.blocks)
    return ir.Op(message.type, inputs, _named(message.outputs), _values(message.attributes), blocks)


def _binding(message: Any) -> ir.Binding:
    return str(message.name) if message.WhichOneof("binding") == "name" else _read_value(message.value)


def _named(messages: Any) -> tuple[ir.Named, ...]:
    return tuple(ir.Named(item.name, _read_type(item.type)) for item in messages)


def _values(entries: Mapping[str, Any]) -> dict[str, ir.Value]:
    return {key: _read_value(entries[key]) for key in sorted(entries)}


def _read_type(message: Any, depth: int = 0) -> ir.Type:
    """Return the type of a `MIL.ValueType` message."""
    if depth > MAX_NESTING:
        raise ProgramError(f"types are nested more than {MAX_NESTING} deep")
    which = message.WhichOneof("type")
    if which == "tensorType":
        return _tensor_type(message.tensorType)
    if which == "stateType":
        wrapped = _read_type(message.stateType.wrappedType, depth + 1)
        if not isinstance(wrapped, ir.TensorType):
            raise ProgramError("a state must wrap a tensor")
        return ir.StateType(wrapped)
    if which == "listType":
        return ir.ListType(_read_type(message.listType.type, depth + 1), _extent(message.listType.length))
    if which == "dictionaryType":
        kinds = message.dictionaryType
        return ir.DictType(_read_type(kinds.keyType, depth + 1), _read_type(kinds.valueType, depth + 1))
    if which == "tupleType":
        return ir.TupleType(tuple(_read_type(item, depth + 1) for item in message.tupleType.types))
    raise ProgramError("a value has no type")


def _tensor_type(message: Any) -> ir.TensorType:
    if message.dataType not in BY_NUMBER:
        raise ProgramError(f"scalar type number {message.dataType} is not known")
    if len(message.dimensions) > MAX_RANK:
        raise ProgramError(f"a tensor has rank {len(message.dimensions)}")
    dimensions = message.dimensions
    variadic = any(d.WhichOneof("dimension") == "unknown" and d.unknown.variadic for d in dimensions)
    return ir.TensorType(BY_NUMBER[message.dataType].name, tuple(_extent(d) for d in dimensions), variadic)


def _extent(message: Any) -> int | None:
    return int(message.constant.size) if message.WhichOneof("dimension") == "constant" else None


def _read_value(message: Any, depth: int = 0) -> ir.Value:
    """Return the literal of a `MIL.Value` message."""
    if depth > MAX_NESTING:
        raise ProgramError(f"values are nested more than {MAX_NESTING} deep")
    kind = _read_type(message.type)
    if message.WhichOneof("value") == "blobFileValue":
        return ir.Value(kind, ir.Blob(message.blobFileValue.fileName, int(message.blobFileValue.offset)))
    immediate = message.immediateValue
    which = immediate.WhichOneof("value")
    if which == "tensor" and isinstance(kind, ir.TensorType):
        return ir.Value(kind, _tensor(immediate.tensor, kind))
    if which in ("list", "tuple"):
        return ir.Value(kind, tuple(_read_value(item, depth + 1) for item in getattr(immediate, which).values))
    if which == "dictionary":
        pairs = immediate.dictionary.values
        return ir.Value(
            kind, ir.Pairs(tuple((_read_value(p.key, depth + 1), _read_value(p.value, depth + 1)) for p in pairs))
        )
    raise ProgramError("a literal's value does not have the type it declares")


def _tensor(message: Any, kind: ir.TensorType) -> np.ndarray:
    scalar = next(s for s in BY_NUMBER.values() if s.name == kind.dtype)
    count = element_count(kind)
    field = message.WhichOneof("value")
    if field is None:
        flat = np.zeros(0, scalar.numpy)
    elif field == "bytes":
        flat = _from_bytes(message.bytes.values, scalar, count)
    else:
        flat = _from_repeated(getattr(message, field).values, field, scalar)
    if flat.size != count:
        raise ProgramError(f"a literal of type {kind.dtype}{list(kind.shape)} holds {flat.size} values, not {count}")
    return flat.reshape(tuple(0 if d is None else d for d in kind.shape))


def element_count(kind: ir.TensorType) -> int:
    """Return elements of a literal's type. Raises ProgramError for unknown extents and absurd sizes."""
    count = 1
    for extent in kind.shape:
        if extent is None:
            raise ProgramError("a literal's shape must be known")
        count *= extent
    if count > _MAX_LITERAL_ELEMENTS:
        raise ProgramError(f"a literal claims {count} elements")
    return count


def _from_repeated(values: Any, field: str, scalar: ScalarType) -> np.ndarray:
    if scalar.name == "string":
        return np.array([v.decode() if isinstance(v, bytes) else str(v) for v in values], np.object_)
    if field == "strings":
        raise ProgramError(f"a literal of type {scalar.name} holds strings")
    return np.array(values).astype(scalar.numpy)


def _from_bytes(data: bytes, scalar: ScalarType, count: int) -> np.ndarray:
    if len(data) * 8 < count * scalar.bits or scalar.name == "string":
        raise ProgramError(f"a literal of {count} {scalar.name} values holds {len(data)} bytes")
    if scalar.bits < 8:
        return unpack_bits(data, scalar.bits, count, signed=scalar.name.startswith("int"))
    return np.frombuffer(data, scalar.numpy)
