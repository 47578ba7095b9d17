"""Matrix products, convolutions and attention: the kernels that hold the weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_coreml.run.ops.registry import Ints, Tensors, kernel
from portable_coreml.run.pieces import in_pieces

_SHARED = 1 << 22  # multiplications in a batch of matrices from which on further threads gain time
_CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def batched(x: Tensor, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return x [..., n, k] @ y [..., k, m] in `dtype`, by default their own; large matrices of a batch are shared."""
    kind, batch = dtype or x.dtype, x.shape[:-2]
    work = x.shape[-2] * x.shape[-1] * y.shape[-1] if len(batch) else 0  # multiplications for one matrix
    if y.shape[:-2] != batch or work * batch.numel() < _SHARED:
        return torch.matmul(x.to(kind), y.to(kind))
    left, right = x.flatten(0, -3), y.flatten(0, -3)
    out = torch.empty(len(left), x.shape[-2], y.shape[-1], dtype=kind)

    def multiply(first: int, last: int) -> None:
        torch.bmm(left[first:last].to(kind), right[first:last].to(kind), out=out[first:last])

    in_pieces(multiply, len(left), _SHARED // work or 1)
    return out.view(*batch, *out.shape[1:])


@kernel("matmul")
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    x = x.transpose(-1, -2) if transpose_x and x.dim() > 1 else x
    y = y.transpose(-1, -2) if transpose_y and y.dim() > 1 else y
    if x.dtype != y.dtype:  # iOS17 multiplies integers with floating-point values
        kind = x.dtype if x.is_floating_point() else y.dtype
        return torch.matmul(x.to(kind), y.to(kind))
    return batched(x, y)


@kernel("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.dtype != x.dtype:  # iOS17 takes an integer weight beside floating-point values
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if not x.is_floating_point():
        product = torch.matmul(x, weight.transpose(-1, -2))
        return product if bias is None else product + bias
    return F.linear(x, weight, bias)


@kernel("einsum")
def einsum(values: Tensors, equation: str) -> Tensor:
    return torch.einsum(equation, *values)


def _same_padding(sizes: Ints, kernel_size: Ints, strides: Ints, dilations: Ints, lower: bool) -> list[int]:
    """Return [before, after] per spatial axis so that the output extent is ceil(size / stride).

    The odd one goes after (or before).
    """
    pads: list[int] = []
    for size, k, stride, dilation in zip(sizes, kernel_size, strides, dilations, strict=True):
        span = (k - 1) * dilation + 1
        total = max((-(-size // stride) - 1) * stride + span - size, 0)
        small, large = total // 2, total - total // 2
        pads += [large, small] if lower else [small, large]
    return pads


def torch_pads(pads: Ints) -> list[int]:
    """Return MIL's pads (first axis first) in the order of torch.nn.functional.pad (last axis first)."""
    pairs = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]
    return [extent for pair in reversed(pairs) for extent in pair]


def resolve_pads(
    x: Tensor, pad_type: str, pad: Ints | None, kernel_size: Ints, strides: Ints, dilations: Ints
) -> list[int]:
    """Return [before, after] per spatial axis of a convolution or pool.

    `pad_type`: valid, same, same_lower or custom.
    """
    if pad_type == "custom":
        return list(pad or [0] * (2 * len(kernel_size)))
    if pad_type in ("same", "same_lower"):
        return _same_padding(x.shape[2:], kernel_size, strides, dilations, pad_type == "same_lower")
    return [0] * (2 * len(kernel_size))


@kernel("conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> Tensor:
    rank = x.dim() - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    pads = resolve_pads(x, pad_type, pad, weight.shape[2:], strides, dilations)
    if pads[0::2] == pads[1::2]:
        return _CONVS[rank](x, weight, bias, strides, pads[0::2], dilations, groups)
    return _CONVS[rank](F.pad(x, torch_pads(pads)), weight, bias, strides, 0, dilations, groups)


@kernel("scaled_dot_product_attention")
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    scores = batched(query, key.transpose(-1, -2)) * (1.0 / math.sqrt(query.shape[-1]))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return batched(torch.softmax(scores, -1), value)
