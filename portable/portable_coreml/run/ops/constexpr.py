"""Compressed weights: every `constexpr_*` operation of iOS16 and iOS18, expanded once when the program is planned.

The same operation type has different arguments in the two generations; a kernel takes both. The formulas follow
coremltools' operation documentation (`mil/ops/defs/iOS16/constexpr_ops.py`, `iOS18/compression.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from portable_coreml.run.ops.registry import Ints, kernel


def _spread(blocks: Tensor, shape: Ints) -> Tensor:
    """Repeat each block's entry over the elements of its block, up to `shape`."""
    for axis, size in enumerate(shape):
        if blocks.shape[axis] not in (1, size):
            blocks = blocks.repeat_interleave(size // blocks.shape[axis], axis)
    return blocks


@kernel("constexpr_blockwise_shift_scale")
def blockwise_shift_scale(data: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    values = data.to(torch.float32)
    if offset is not None:
        values = values - _spread(offset.to(torch.float32), data.shape)
    return values * _spread(scale, data.shape)


@kernel("constexpr_affine_dequantize")
def affine_dequantize(quantized_data: Tensor, zero_point: Tensor, scale: Tensor, axis: int) -> Tensor:
    shape = [-1 if d == axis % quantized_data.dim() else 1 for d in range(quantized_data.dim())]
    values = quantized_data.to(torch.float32)
    shift = zero_point.to(torch.float32)
    shift = shift.reshape(shape) if shift.dim() else shift
    return (values - shift) * (scale.reshape(shape) if scale.dim() else scale)


@kernel("constexpr_cast")
def constexpr_cast(source_val: Tensor, output_dtype: str) -> Tensor:
    return source_val.to(torch.float32)


@kernel("constexpr_lut_to_dense", exact=True)
def lut_to_dense(indices: Tensor, lut: Tensor, shape: Ints | None = None, vector_axis: int | None = None) -> Tensor:
    if shape is not None:
        return _unpacked_lut(indices, lut, shape)
    rank = indices.dim()
    entries, width = lut.shape[-2], lut.shape[-1]
    groups = torch.arange(lut[..., 0, 0].numel()).reshape(lut.shape[:rank])
    flat = _spread(groups, indices.shape) * entries + indices.to(torch.int64)
    vectors = lut.reshape(-1, width)[flat]  # [*indices, width]
    if width == 1:
        return vectors.squeeze(-1)
    axis = int(vector_axis or 0) % rank
    return vectors.movedim(-1, axis + 1).flatten(axis, axis + 1)


def _unpacked_lut(packed: Tensor, lut: Tensor, shape: Ints) -> Tensor:
    """Look up the indices of iOS16: of log2(len(lut)) bits each, packed least significant bit first."""
    bits = max(int(lut.numel()).bit_length() - 1, 1)
    count = 1
    for size in shape:
        count *= size
    stream = _bit_stream(packed)[: count * bits].reshape(count, bits)
    index = (stream * (1 << torch.arange(bits))).sum(1)
    return lut[index].reshape(list(shape))


def _bit_stream(packed: Tensor) -> Tensor:
    return ((packed.reshape(-1, 1).to(torch.int64) >> torch.arange(8)) & 1).reshape(-1)


@kernel("constexpr_sparse_to_dense", exact=True)
def sparse_to_dense(nonzero_data: Tensor, mask: Tensor, shape: Ints | None = None) -> Tensor:
    if shape is None:
        keep = mask.to(torch.bool)
    else:
        count = 1
        for size in shape:
            count *= size
        keep = _bit_stream(mask)[:count].reshape(list(shape)).to(torch.bool)
    dense = torch.zeros(keep.shape, dtype=nonzero_data.dtype)
    dense[keep] = nonzero_data
    return dense


@kernel("constexpr_lut_to_sparse", exact=True)
def lut_to_sparse(
    indices_mask: Tensor, indices_nonzero_data: Tensor, lut: Tensor, vector_axis: int | None = None
) -> tuple[Tensor, Tensor]:
    indices = sparse_to_dense(indices_nonzero_data, indices_mask)
    dense = lut_to_dense(indices, lut, None, vector_axis)
    mask = indices_mask if lut.shape[-1] == 1 else indices_mask.repeat_interleave(lut.shape[-1], int(vector_axis or 0))
    return mask, dense[mask.to(torch.bool)]


@kernel("constexpr_sparse_blockwise_shift_scale")
def sparse_blockwise_shift_scale(
    data_mask: Tensor, nonzero_data: Tensor, scale: Tensor, offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dense = blockwise_shift_scale(sparse_to_dense(nonzero_data, data_mask), scale, offset)
    return data_mask, dense[data_mask.to(torch.bool)]
