"""Gathers and scatters.

Before iOS17 negative indices count from the end, as in numpy. From iOS17 on, where the operations have an argument
`validate_indices`, negative indices are out of bounds. They are an error if the argument is true, and otherwise
undefined but safe. Here an undefined read gives the last element, and an undefined write is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_coreml.errors import ExecutionError
from portable_coreml.run.ops.registry import kernel


def _slots(indices: Tensor, size: int, validate: bool | None) -> Tensor:
    """Return indices into an axis of `size`, those out of bounds as `size`.

    Before iOS17 pass None as `validate`. Raises ExecutionError if `validate` is true and an index is out of bounds.
    """
    index = indices.to(torch.int64)
    if validate is None:
        return torch.where(index < 0, index + size, index)
    if validate and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise ExecutionError(
            "Unable to compute the prediction using ML Program: "
            f"indices {int(index.min())} to {int(index.max())} leave an axis of {size}"
        )
    return torch.where((index < 0) | (index >= size), size, index)


def _readable(indices: Tensor, size: int, validate: bool | None) -> Tensor:
    index = _slots(indices, size, validate)
    return index if validate is None else index.clamp(max=max(size - 1, 0))


def _pick(x: Tensor, index: Tensor, axis: int) -> Tensor:
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@kernel("gather", exact=True)
def gather(
    x: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0, validate_indices: bool | None = None
) -> Tensor:
    axis %= x.dim()
    index = _readable(indices, x.shape[axis], validate_indices)
    return _batched_gather(x, index, axis, batch_dims) if batch_dims else _pick(x, index, axis)


def _batched_gather(x: Tensor, index: Tensor, axis: int, batch_dims: int) -> Tensor:
    lead = x.shape[:batch_dims]
    flat_x = x.reshape(-1, *x.shape[batch_dims:])
    flat_index = index.reshape(-1, *index.shape[batch_dims:])
    rows = [_pick(row, where, axis - batch_dims) for row, where in zip(flat_x, flat_index, strict=True)]
    return torch.stack(rows).reshape(*lead, *rows[0].shape)


@kernel("gather_along_axis", exact=True)
def gather_along_axis(x: Tensor, indices: Tensor, axis: int = 0, validate_indices: bool | None = None) -> Tensor:
    return torch.gather(x, axis, _readable(indices, x.shape[axis], validate_indices))


@kernel("gather_nd", exact=True)
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0, validate_indices: bool | None = None) -> Tensor:
    if batch_dims:
        lead = x.shape[:batch_dims]
        flat_x, flat_index = x.reshape(-1, *x.shape[batch_dims:]), indices.reshape(-1, *indices.shape[batch_dims:])
        rows = [gather_nd(row, where, 0, validate_indices) for row, where in zip(flat_x, flat_index, strict=True)]
        return torch.stack(rows).reshape(*lead, *rows[0].shape)
    return x[tuple(_readable(indices[..., i], x.shape[i], validate_indices) for i in range(indices.shape[-1]))]


def _places(data: Tensor, axes: Iterable[int]) -> Tensor:
    """Return the flat position of every element, with one more row on each of `axes` that stands for nowhere."""
    rows = [0] * data.dim()
    for axis in axes:
        rows[axis] = 1
    places = torch.arange(data.numel()).reshape(data.shape)
    return F.pad(places, [n for row in reversed(rows) for n in (0, row)], value=data.numel())


def _write(data: Tensor, places: Tensor, updates: Tensor, mode: str) -> Tensor:
    """Write `updates` to flat positions, data.numel() being nowhere.

    Modes: update, add, sub, mul, div, max, min; repeated positions accumulate in order.
    """
    out, flat = torch.cat([data.reshape(-1), data.new_zeros(1)]), places.reshape(-1)
    source = updates.expand(places.shape).reshape(-1).to(data.dtype)
    if mode == "update":
        out[flat] = source
    elif mode in ("add", "sub"):
        out = out.index_put((flat,), source if mode == "add" else -source, accumulate=True)
    else:
        reduce = {"mul": "prod", "div": "prod", "max": "amax", "min": "amin"}[mode]
        out = out.scatter_reduce(0, flat, torch.reciprocal(source) if mode == "div" else source, reduce)
    return out[:-1].reshape(data.shape)


@kernel("scatter")
def scatter(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool | None = None,
) -> Tensor:
    axis %= data.dim()
    index = _slots(indices, data.shape[axis], validate_indices)
    return _write(data, _pick(_places(data, [axis]), index, axis), updates, mode)


@kernel("scatter_along_axis")
def scatter_along_axis(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool | None = None,
) -> Tensor:
    index = _slots(indices, data.shape[axis], validate_indices)
    return _write(data, torch.gather(_places(data, [axis]), axis, index), updates, mode)


@kernel("scatter_nd")
def scatter_nd(
    data: Tensor, indices: Tensor, updates: Tensor, mode: str = "add", validate_indices: bool | None = None
) -> Tensor:
    axes = range(indices.shape[-1])
    index = tuple(_slots(indices[..., i], data.shape[i], validate_indices) for i in axes)
    return _write(data, _places(data, axes)[index], updates, mode)
