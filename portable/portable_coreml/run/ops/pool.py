"""Pooling over one to three spatial axes.

Padding never wins a maximum; `ceil_mode` extends the padding after the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_coreml.run.ops.linear import resolve_pads, torch_pads
from portable_coreml.run.ops.registry import Ints, kernel

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
