"""Pooling, transposed convolutions and normalisations over one to three spatial axes.

In a pool, padding never wins a maximum; `ceil_mode` extends the padding after the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from portable_coreml.run.ops.linear import resolve_pads, torch_pads
from portable_coreml.run.ops.registry import Ints, kernel
from torch import Tensor

_MAX: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _padding(
    x: Tensor, kernel_sizes: Ints, strides: Ints, pad_type: str, pad: Ints | None, ceil_mode: bool
) -> tuple[list[int], list[int]]:
    """Return ([before, after] per axis as requested, the padding extended for `ceil_mode`)."""
    pads = resolve_pads(x, pad_type, pad, kernel_sizes, strides, [1] * len(kernel_sizes))
    extended = list(pads)
    for i, (k, s) in enumerate(zip(kernel_sizes, strides, strict=True)):
        if not ceil_mode:
            break
        before, after, size = pads[2 * i], pads[2 * i + 1], x.shape[2 + i]
        count = (size + before + after - k + s - 1) // s + 1
        if (count - 1) * s >= size + before and (before > 0 or after > 0):
            count -= 1
        extended[2 * i + 1] = max((count - 1) * s + k - size - before, after)
    return pads, extended


@kernel("max_pool", exact=True)
def max_pool(
    x: Tensor,
    kernel_sizes: Ints,
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    strides = strides or [1] * len(kernel_sizes)
    _, pads = _padding(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    padded = F.pad(x, torch_pads(pads), value=-math.inf) if any(pads) else x
    return _MAX[len(kernel_sizes)](padded, kernel_sizes, strides)


@kernel("avg_pool")
def avg_pool(
    x: Tensor,
    kernel_sizes: Ints,
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    strides = strides or [1] * len(kernel_sizes)
    asked, pads = _padding(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    average = _AVERAGE[len(kernel_sizes)]
    mean = average(F.pad(x, torch_pads(pads)), kernel_sizes, strides)
    if not any(pads) or (asked == pads and not exclude_padding_from_average):
        return mean
    ones = torch.ones((1, 1, *x.shape[2:]))
    counted = ones if exclude_padding_from_average else F.pad(ones, torch_pads(asked), value=1.0)
    extra = pads if exclude_padding_from_average else [p - a for p, a in zip(pads, asked, strict=True)]
    return mean / average(F.pad(counted, torch_pads(extra)), kernel_sizes, strides)


@kernel("l2_pool")
def l2_pool(
    x: Tensor,
    kernel_sizes: Ints,
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    mean = avg_pool(torch.square(x), kernel_sizes, strides, pad_type, pad, False, ceil_mode)
    return torch.sqrt(mean * math.prod(kernel_sizes))


_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@kernel("conv_transpose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    pad: Ints | None = None,
    output_shape: Ints | None = None,
    pad_type: str = "valid",
    strides: Ints | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> Tensor:
    rank = x.dim() - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    full = _TRANSPOSED[rank](x, weight, bias, strides, 0, 0, groups, dilations)
    spans = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations, strict=True)]
    if pad_type in ("same", "same_lower"):
        # The gradient of a "same" convolution whose input had this transposed output's extents.
        wanted = (
            list(output_shape[-rank:]) if output_shape else [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
        )
        totals = [max(k - s, 0) for k, s in zip(spans, strides, strict=True)]
        before = [t - t // 2 if pad_type == "same_lower" else t // 2 for t in totals]
    else:
        pads = list(pad or [0] * (2 * rank)) if pad_type == "custom" else [0] * (2 * rank)
        before = pads[0::2]
        cropped = [full.shape[2 + i] - pads[2 * i] - pads[2 * i + 1] for i in range(rank)]
        wanted = list(output_shape[-rank:]) if output_shape else cropped
    for axis, (start, size) in enumerate(zip(before, wanted, strict=True), 2):
        missing = start + size - full.shape[axis]
        if missing > 0:  # output_shape may ask for rows that no input reaches: they hold the bias alone
            full = _extend(full, bias, axis, missing)
        full = full.narrow(axis, start, size)
    return full


def _extend(full: Tensor, bias: Tensor | None, axis: int, missing: int) -> Tensor:
    shape = list(full.shape)
    shape[axis] = missing
    fill = torch.zeros(shape) if bias is None else bias.view(1, -1, *[1] * (full.dim() - 2)).expand(shape)
    return torch.cat([full, fill], axis)


def _per_channel(parameter: Tensor, rank: int) -> Tensor:
    return parameter.view(1, -1, *[1] * (rank - 2))


@kernel("batch_norm")
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    scale = torch.rsqrt(variance + epsilon)
    scale = scale if gamma is None else scale * gamma
    out = (x - _per_channel(mean, x.dim())) * _per_channel(scale, x.dim())
    return out if beta is None else out + _per_channel(beta, x.dim())


@kernel("instance_norm")
def instance_norm(x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    axes = list(range(2, x.dim()))
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    out = (x - mean) * torch.rsqrt(variance + epsilon)
    out = out if gamma is None else out * _per_channel(gamma, x.dim())
    return out if beta is None else out + _per_channel(beta, x.dim())


@kernel("l2_norm")
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    axes = list(range(x.dim() - 3, x.dim())) if x.dim() >= 3 else list(range(x.dim()))
    return x * torch.rsqrt(torch.sum(torch.square(x), axes, keepdim=True) + epsilon)


@kernel("local_response_norm")
def local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    return F.local_response_norm(x, size, alpha, beta, k)
