"""Gathers and scatters. Negative indices count from the end, as in numpy."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import kernel


def _wrapped(indices: Tensor, size: int) -> Tensor:
    index = indices.to(torch.int64)
    return torch.where(index < 0, index + size, index)


@kernel("gather", exact=True)
def gather(x: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False) -> Tensor:
    axis %= x.dim()
    index = _wrapped(indices, x.shape[axis])
    if batch_dims:
        return _batched_gather(x, index, axis, batch_dims)
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _batched_gather(x: Tensor, index: Tensor, axis: int, batch_dims: int) -> Tensor:
    lead = x.shape[:batch_dims]
    flat_x = x.reshape(-1, *x.shape[batch_dims:])
    flat_index = index.reshape(-1, *index.shape[batch_dims:])
    rows = [gather(row, where, axis - batch_dims) for row, where in zip(flat_x, flat_index, strict=True)]
    return torch.stack(rows).reshape(*lead, *rows[0].shape)


@kernel("gather_along_axis", exact=True)
def gather_along_axis(x: Tensor, indices: Tensor, axis: int = 0, validate_indices: bool = False) -> Tensor:
    return torch.gather(x, axis, _wrapped(indices, x.shape[axis]))


@kernel("gather_nd", exact=True)
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0, validate_indices: bool = False) -> Tensor:
    if batch_dims:
        lead = x.shape[:batch_dims]
        flat_x, flat_index = x.reshape(-1, *x.shape[batch_dims:]), indices.reshape(-1, *indices.shape[batch_dims:])
        rows = [gather_nd(row, where) for row, where in zip(flat_x, flat_index, strict=True)]
        return torch.stack(rows).reshape(*lead, *rows[0].shape)
    return x[_nd_index(x, indices)]


def _nd_index(x: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    return tuple(_wrapped(indices[..., i], x.shape[i]) for i in range(indices.shape[-1]))


def _combine(data: Tensor, index: tuple[Tensor, ...], updates: Tensor, mode: str) -> Tensor:
    """Writes `updates` to data[index]. Modes: update, add, sub, mul, div, max, min; repeated indices accumulate in
    order.
    """
    out = data.clone()
    if mode == "update":
        out[index] = updates.to(out.dtype)
        return out
    if mode in ("add", "sub"):
        return out.index_put(index, updates if mode == "add" else -updates, accumulate=True)
    reduce = {"mul": "prod", "div": "prod", "max": "amax", "min": "amin"}[mode]
    flat = torch.arange(data.numel()).reshape(data.shape)[index].reshape(-1)
    source = (torch.reciprocal(updates) if mode == "div" else updates).reshape(-1)
    return out.reshape(-1).scatter_reduce(0, flat, source, reduce).reshape(data.shape)


@kernel("scatter")
def scatter(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add", validate_indices: bool = False
) -> Tensor:
    axis %= data.dim()
    places = torch.arange(data.numel()).reshape(data.shape)
    flat = gather(places, _wrapped(indices, data.shape[axis]), axis)
    out = _combine(data.reshape(-1), (flat.reshape(-1),), updates.expand(flat.shape).reshape(-1), mode)
    return out.reshape(data.shape)


@kernel("scatter_along_axis")
def scatter_along_axis(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add", validate_indices: bool = False
) -> Tensor:
    where = _wrapped(indices, data.shape[axis])
    index = [
        torch.arange(n).reshape([-1 if d == i else 1 for d in range(data.dim())]) for i, n in enumerate(where.shape)
    ]
    index[axis % data.dim()] = where
    return _combine(data, tuple(item.expand(where.shape) for item in index), updates, mode)


@kernel("scatter_nd")
def scatter_nd(
    data: Tensor, indices: Tensor, updates: Tensor, mode: str = "add", validate_indices: bool = False
) -> Tensor:
    return _combine(data, _nd_index(data, indices), updates, mode)
