"""Large constant matrices left as they are stored: int8 with one scale per output channel, or fp16.

They stay mapped from the weight file, so a program of gigabytes takes no additional memory and is shared between
processes; products.py computes with them. A form without a numpy type is held in the narrowest numpy type that fits:
int4 with its scales in a byte for each number, a palette's numbers in fp16. A large matrix in any other form, or with
a use outside of products, is expanded like any other constant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from portable_coreml.program import Op, TensorType, Value
from portable_coreml.run.packed import Packed

LARGE = 1 << 22  # elements; a smaller matrix is multiplied faster in float32 than expanded block by block
# Elements of a matrix for which there is a kernel that reads it as it is stored, or a packed copy. A smaller one takes
# as long in float32, and its memory is not worth the saving.
LARGE_WITH_KERNEL = 1 << 19
SCALED = {"constexpr_blockwise_shift_scale": "data", "constexpr_affine_dequantize": "quantized_data"}
LOOKED_UP = "constexpr_lut_to_dense"
_INTEGERS = frozenset({"int4", "int8"})
_INDICES = frozenset({"uint1", "uint2", "uint3", "uint4", "uint6", "uint8"})
_Literals = Mapping[str, Value]
_Load = Callable[[Value], np.ndarray]


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """The matrix `values * scale`: values [out, in] in int8 or fp16, scale [out, 1] in float32 or None.

    `half`: each weight is rounded to fp16, as the result of the operation that would expand it is. `packed`: holds a
    copy that is multiplied faster.
    """

    values: Tensor
    scale: Tensor | None
    half: bool
    packed: Packed = field(default_factory=Packed)


def least_stored(kernel: bool) -> int:
    """Return the least number of elements of a matrix of integers that stays as it is stored.

    `kernel`: whether such matrices are multiplied by a kernel of their own.
    """
    return min(LARGE, LARGE_WITH_KERNEL) if kernel else LARGE


def is_compressed(kind: str, literals: _Literals, least: int) -> bool:
    """Return whether a product may be left to expand an operation's result.

    Args:
        kind: the operation's kind.
        literals: the arguments that are literals.
        least: the result of `least_stored`.
    """
    if kind == LOOKED_UP:
        return "shape" not in literals and _is_large(literals.get("indices"), _INDICES, LARGE)
    return kind in SCALED and _is_large(literals.get(SCALED[kind]), _INTEGERS, least)


def _is_large(literal: Value | None, dtypes: Collection[str], least: int) -> bool:
    """Return whether a literal of one of the types is a large matrix; axes of size 1 may follow the first two."""
    if literal is None or not isinstance(literal.type, TensorType) or literal.type.dtype not in dtypes:
        return False
    sizes = [size or 0 for size in literal.type.shape]
    return len(sizes) > 1 and prod(sizes) >= least and prod(sizes[2:]) == 1


def stored_matrix(
    source: Op | Value, literals: _Literals, out: int, load: _Load, half: bool, least: int
) -> StoredMatrix | None:
    """Return a literal in fp16, or an operation that expands a matrix (`literals`: its arguments), as it is stored.

    `out` is the output channels' axis, `least` as in `is_compressed`. None if it is no large matrix, or has a
    zero point or scales of another axis.
    """
    if isinstance(source, Value):
        if not _is_large(source, {"fp16"}, LARGE):
            return None
        literal = load(source)
        return StoredMatrix(_matrix(literal, out), None, False, Packed(literal))
    if source.kind == LOOKED_UP:
        dense = _looked_up(literals, load) if is_compressed(source.kind, literals, least) else None
        return None if dense is None else StoredMatrix(_matrix(dense, out), None, False)
    data, scale = literals.get(SCALED.get(source.kind, "")), literals.get("scale")
    if data is None or scale is None or not _is_large(data, _INTEGERS, least) or _is_shifted(literals, load):
        return None
    values, factors, declared = load(data), load(scale), source.outputs[0].type
    if not _is_per_channel(values.shape, factors, literals.get("axis"), out, load):
        return None
    matrix = _matrix(values, out)
    column = torch.from_numpy(factors.astype(np.float32)).reshape(-1, 1).expand(len(matrix), 1)
    half = half and isinstance(declared, TensorType) and declared.dtype == "fp16"
    return StoredMatrix(matrix, column, half, Packed(values))


def _looked_up(literals: _Literals, load: _Load) -> np.ndarray | None:
    """Return a palette's numbers; None where tables are not of fp16 numbers, one table for some rows each."""
    indices, lut = (load(literals[name]) for name in ("indices", "lut"))
    if lut.dtype != np.float16 or lut.shape[-1] != 1 or len(lut) != prod(lut.shape[:-2]):
        return None
    tables = lut.reshape(len(lut), -1)
    dense = np.empty(indices.shape, np.float16)
    rows = len(indices) // len(tables)
    for i, table in enumerate(tables):
        np.take(table, indices[i * rows : (i + 1) * rows], out=dense[i * rows : (i + 1) * rows], mode="clip")
    return dense


def _matrix(values: np.ndarray, out: int) -> Tensor:
    """Return a constant as [out, in], sharing its memory."""
    matrix = torch.from_numpy(values.reshape(values.shape[:2]))
    return matrix if out == 0 else matrix.t()


def _is_shifted(literals: _Literals, load: _Load) -> bool:
    """Return whether there is a zero point other than 0."""
    shifts = [literals[name] for name in ("offset", "zero_point") if name in literals]
    return any(bool(np.any(load(shift))) for shift in shifts)


def _is_per_channel(shape: tuple[int, ...], scale: np.ndarray, axis: Value | None, out: int, load: _Load) -> bool:
    """Return whether a scale is one number, or one for each output channel."""
    if scale.size == 1:
        return True
    if axis is not None:  # iOS16: a vector along `axis`
        return scale.shape == (shape[out],) and int(load(axis)) % len(shape) == out
    return scale.shape == tuple(size if i == out else 1 for i, size in enumerate(shape))
