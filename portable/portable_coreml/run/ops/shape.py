"""Kernels that move values without computing: reshape, transpose, slices, concatenation, padding, tiling.

Where torch can return a view it does; no kernel writes into its inputs, so a view is as good as a copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_coreml.run.ops.registry import Bools, Ints, Tensors, kernel


@kernel("shape", shape_only=True)
def shape(x: Tensor) -> Tensor:
    return torch.tensor(x.shape, dtype=torch.int32)


@kernel("reshape", exact=True)
def reshape(x: Tensor, shape: Ints) -> Tensor:
    """Reshape; a 0 keeps the extent at its place, counted from the last axis, or is 1 before the first (iOS17)."""
    extents = [1] * (len(shape) - x.dim()) + list(x.shape)[max(x.dim() - len(shape), 0) :]
    return x.reshape([k if s == 0 and x.numel() else int(s) for s, k in zip(shape, extents, strict=True)])


@kernel("reshape_like", exact=True)
def reshape_like(x: Tensor, ref_tensors: Tensors, begins: Ints, ends: Ints, end_masks: Bools) -> Tensor:
    sizes: list[int] = []
    for ref, begin, end, masked in zip(ref_tensors, begins, ends, end_masks, strict=True):
        sizes += ref.shape[int(begin) : None if masked else int(end)]
    return x.reshape(sizes)


@kernel("transpose", exact=True)
def transpose(x: Tensor, perm: Ints) -> Tensor:
    return x.permute(*perm) if perm else x


@kernel("squeeze", exact=True)
def squeeze(x: Tensor, axes: Ints | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


@kernel("expand_dims", exact=True)
def expand_dims(x: Tensor, axes: Ints) -> Tensor:
    rank = x.dim() + len(axes)
    for axis in sorted(int(a) % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


@kernel("concat", exact=True)
def concat(values: Tensors, axis: int, interleave: bool = False) -> Tensor:
    values = [v.reshape(1) if v.dim() == 0 else v for v in values]
    if not interleave:
        return torch.cat(values, axis)
    axis %= values[0].dim()
    return torch.stack(list(values), axis + 1).flatten(axis, axis + 1)


@kernel("stack", exact=True)
def stack(values: Tensors, axis: int) -> Tensor:
    return torch.stack(list(values), axis)


@kernel("split", exact=True)
def split(x: Tensor, axis: int, num_splits: int | None = None, split_sizes: Ints | None = None) -> tuple[Tensor, ...]:
    if split_sizes is not None:
        return torch.split(x, list(split_sizes), axis)
    assert num_splits is not None
    return torch.split(x, x.shape[axis] // num_splits, axis)


@kernel("tile", exact=True, grows=True)
def tile(x: Tensor, reps: Ints) -> Tensor:
    return x.repeat(*reps) if reps else x


@kernel("reverse", exact=True)
def reverse(x: Tensor, axes: Ints | None = None) -> Tensor:
    return torch.flip(x, list(range(x.dim())) if axes is None else list(axes))


@kernel("slice_by_index", exact=True)
def slice_by_index(
    x: Tensor,
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Bools | None = None,
    end_mask: Bools | None = None,
    squeeze_mask: Bools | None = None,
) -> Tensor:
    return _apply_slices(x, slices(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask))


def slices(
    sizes: Ints,
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Bools | None = None,
    end_mask: Bools | None = None,
    squeeze_mask: Bools | None = None,
) -> list[slice | int]:
    """Return numpy's index for MIL's begin, end, stride and masks. A squeezed axis becomes an integer index."""
    index: list[slice | int] = []
    for axis in range(len(begin)):
        step = 1 if stride is None else int(stride[axis])
        if squeeze_mask is not None and squeeze_mask[axis]:
            free = begin_mask is not None and begin_mask[axis]
            index.append((0 if step > 0 else sizes[axis] - 1) if free else int(begin[axis]))
            continue
        start = None if begin_mask is not None and begin_mask[axis] else int(begin[axis])
        stop = None if end_mask is not None and end_mask[axis] else int(end[axis])
        index.append(slice(start, stop, step))
    return index


def _apply_slices(x: Tensor, index: list[slice | int]) -> Tensor:
    """Slice an axis of negative step forwards and flip it, since torch has no negative steps."""
    forward: list[slice | int] = []
    flipped: list[int] = []
    position = 0
    for axis, item in enumerate(index):
        if isinstance(item, slice) and item.step is not None and item.step < 0:
            picked = range(x.shape[axis])[item]
            last = picked[-1] if len(picked) else 0
            forward.append(slice(last, (picked[0] + 1) if len(picked) else 0, -item.step))
            flipped.append(position)
        else:
            forward.append(item)
        position += not isinstance(item, int)
    out = x[tuple(forward)]
    return torch.flip(out, flipped) if flipped else out


@kernel("slice_by_size", exact=True)
def slice_by_size(x: Tensor, begin: Ints, size: Ints) -> Tensor:
    starts = [b + x.shape[i] if b < 0 else b for i, b in enumerate(begin)]
    return x[
        tuple(slice(b, x.shape[i] if s == -1 else b + s) for i, (b, s) in enumerate(zip(starts, size, strict=True)))
    ]


@kernel("slice_update", exact=True)
def slice_update(
    x: Tensor,
    update: Tensor,
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Bools | None = None,
    end_mask: Bools | None = None,
    squeeze_mask: Bools | None = None,
) -> Tensor:
    out = x.clone()
    index = slices(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    picked = torch.arange(x.numel()).reshape(x.shape)
    where = _apply_slices(picked, index).reshape(-1)
    out.view(-1)[where] = update.expand(_apply_slices(x, index).shape).reshape(-1)
    return out


@kernel("pad", exact=True, grows=True)
def pad(x: Tensor, pad: Ints, mode: str = "constant", constant_val: float = 0.0) -> Tensor:
    pairs = [(int(pad[i]), int(pad[i + 1])) for i in range(0, len(pad), 2)]
    if mode == "constant":
        return F.pad(x, [e for pair in reversed(pairs) for e in pair], value=constant_val)
    first = x.dim() - len(pairs)
    for axis, (before, after) in enumerate(pairs, first):
        x = x.index_select(axis, _border_index(x.shape[axis], before, after, mode))
    return x


def _border_index(size: int, before: int, after: int, mode: str) -> Tensor:
    index = torch.arange(-before, size + after)
    if mode == "reflect" and size > 1:
        period = 2 * (size - 1)
        index = index.remainder(period)
        return torch.minimum(index, period - index)
    return index.clamp(0, size - 1)


@kernel("band_part", exact=True)
def band_part(x: Tensor, lower: int = -1, upper: int = -1) -> Tensor:
    rows, columns = torch.arange(x.shape[-2]).unsqueeze(1), torch.arange(x.shape[-1])
    keep = torch.ones(x.shape[-2:], dtype=torch.bool)
    keep = keep if lower < 0 else keep & (rows - columns <= lower)
    keep = keep if upper < 0 else keep & (columns - rows <= upper)
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype))


@kernel("fill", exact=True, grows=True)
def fill(shape: Ints, value: Tensor | None = None) -> Tensor:
    sizes = [int(s) for s in shape]
    return torch.zeros(sizes) if value is None else value.reshape([1] * len(sizes)).expand(sizes).contiguous()


@kernel("fill_like", exact=True)
def fill_like(ref_tensor: Tensor, value: Tensor | None = None) -> Tensor:
    return fill(ref_tensor.shape, value)


@kernel("range_1d", grows=True)
def range_1d(end: float, start: float, step: float) -> Tensor:
    values = torch.arange(start, end, step)
    return values.to(torch.float32) if values.is_floating_point() else values.to(torch.int32)


@kernel("one_hot", exact=True, grows=True)
def one_hot(
    indices: Tensor, one_hot_vector_size: int, axis: int = -1, on_value: float = 1, off_value: float = 0
) -> Tensor:
    hot = torch.eq(indices.unsqueeze(-1), torch.arange(one_hot_vector_size))
    kind = torch.float32 if isinstance(on_value, float) else torch.int32
    out = torch.where(hot, torch.tensor(on_value, dtype=kind), torch.tensor(off_value, dtype=kind))
    return out.movedim(-1, axis)


@kernel("non_zero", data_shape=True)
def non_zero(x: Tensor) -> Tensor:
    return torch.nonzero(x).to(torch.int32)


@kernel("flatten2d", exact=True)
def flatten2d(x: Tensor, axis: int = 1) -> Tensor:
    lead = 1
    for size in x.shape[:axis]:
        lead *= size
    return x.reshape(lead, -1)
