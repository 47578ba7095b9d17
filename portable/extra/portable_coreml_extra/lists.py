"""Lists of tensors: a growing array of equally shaped elements, as loops collect them.

A list is a tuple of tensors and is never changed in place: a write gives a new one. A write behind the end fills the
gap with zeros. Raises ExecutionError for an index that no real program would use.
"""

from __future__ import annotations

import torch
from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import ExecutionError
from portable_coreml.run.ops.registry import Elements, Ints, kernel
from torch import Tensor

_MAX_LENGTH = 1 << 20


@kernel("make_list", exact=True, data_shape=True)
def make_list(
    elem_shape: Ints = (), init_length: int = 1, dynamic_length: bool = True, dtype: str = "fp32"
) -> tuple[Elements]:
    """Return `init_length` zeros. An extent of `elem_shape` that is a name is not known before the first write: 0."""
    extents = elem_shape if isinstance(elem_shape, (list, tuple)) else [elem_shape]  # one extent comes bare
    sizes = [n if isinstance(n, int) else 0 for n in extents]
    if not 0 <= init_length <= _MAX_LENGTH:
        raise ExecutionError(f"a list of {init_length} elements")
    return ((torch.zeros(sizes, dtype=BY_NAME[dtype].torch),) * init_length,)


@kernel("list_length", exact=True, data_shape=True)
def list_length(ls: Elements) -> Tensor:
    return torch.tensor(len(ls), dtype=torch.int32)


@kernel("list_read", exact=True, data_shape=True)
def list_read(ls: Elements, index: int) -> Tensor:
    _check(index, len(ls))
    return ls[index]


@kernel("list_gather", exact=True, data_shape=True)
def list_gather(ls: Elements, indices: Ints) -> Tensor:
    return torch.stack([list_read(ls, index) for index in indices])


@kernel("list_write", exact=True, data_shape=True)
def list_write(ls: Elements, index: int, value: Tensor) -> tuple[Elements]:
    return (_written(ls, [index], value.unsqueeze(0)),)


@kernel("list_scatter", exact=True, data_shape=True)
def list_scatter(ls: Elements, indices: Ints, value: Tensor) -> tuple[Elements]:
    return (_written(ls, indices, value),)


def _written(ls: Elements, indices: Ints, values: Tensor) -> Elements:
    """Return `ls` with values[i] at indices[i], longer where that is needed."""
    for index in indices:
        _check(index)
    zero = torch.zeros_like(values[0])
    items = [item if item.shape == zero.shape else zero for item in ls]
    items += [zero] * (max(indices) + 1 - len(items))
    for index, value in zip(indices, values, strict=True):
        items[index] = value
    return tuple(items)


def _check(index: int, length: int = _MAX_LENGTH) -> None:
    if not 0 <= index < length:
        raise ExecutionError(f"a list has no element {index}: it holds {length}")
