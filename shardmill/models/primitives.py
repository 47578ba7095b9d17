"""The blocks of the graph contract, as PyTorch modules that trace to operations the Neural Engine takes.

Activations are [1, channels, T, 1], every projection is a 1x1 convolution, no tensor has more than four axes, and
nothing is indexed by a runtime value. T is symbolic after conversion: only -1 stands for it in a reshape.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

# Below this magnitude RMSNorm divides by the constant instead of the largest element, so that a token of zeros is safe.
NORM_FLOOR = 2.0**-4


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the channel axis, without leaving the range of fp16.

    The square of an activation over 256 overflows fp16, so x is first divided by its largest magnitude m; the mean of
    the squares then lies in 1/channels .. 1, and eps is divided by m^2 to keep the result exactly RMSNorm's. Spelled
    in operations that were measured on the Neural Engine, hence no abs, no clip and no reciprocal.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.reshape(1, -1, 1, 1), requires_grad=False)
        self.floor: Tensor
        self.root_eps: Tensor
        self.register_buffer("floor", torch.full((1, 1, 1, 1), NORM_FLOOR))
        self.register_buffer("root_eps", torch.full((1, 1, 1, 1), math.sqrt(eps)))

    def forward(self, x: Tensor) -> Tensor:
        high, low = x.amax(dim=1, keepdim=True), x.amin(dim=1, keepdim=True)  # [1, 1, T, 1]
        largest = torch.maximum(torch.maximum(high, low * -1), self.floor)
        y, e = x / largest, self.root_eps / largest
        return y * torch.rsqrt((y * y).mean(dim=1, keepdim=True) + e * e) * self.weight


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor, to a few parts in 10^6 though constants are stored in fp16.

    A square root such as head_dim ** -0.5 is off by up to 2e-4 in fp16, which would be most of the error between this
    program and the model it was made from. The product of two fp16 numbers comes as close as wanted.
    """
    for constant in fp16_factors(factor):
        x = x * constant
    return x


def fp16_factors(value: float) -> tuple[float, ...]:
    """One or two numbers that fp16 holds exactly and whose product is `value` to a few parts in 10^6."""
    if float(np.float16(value)) == value:
        return (value,)
    first = 1 + np.arange(1024) / 1024  # every fp16 number in [1, 2)
    second = (value / first).astype(np.float16).astype(np.float64)
    best = int(np.argmin(np.abs(first * second - value)))
    return float(first[best]), float(second[best])


def projection(weight: Tensor) -> nn.Conv2d:
    """A linear layer of [out, in] weights as the 1x1 convolution over [1, in, T, 1]."""
    rows, columns = weight.shape
    conv = nn.Conv2d(columns, rows, kernel_size=1, bias=False)
    conv.weight = nn.Parameter(weight[:, :, None, None], requires_grad=False)
    return conv


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Rotary embedding of the first dimensions of each head; the rest passes through.

    Args: x [1, heads, head_dim, T]; cos, sin [rope_dim / 2, T]; sizes (rope_dim / 2, head_dim - rope_dim), given
    as numbers because a size read from a traced tensor is not a constant.
    """
    half, rest = sizes
    a, b, *tail = torch.split(x, [half, half, rest] if rest else [half, half], dim=2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, *tail], dim=2)


def write_cache(cache: Tensor, new: Tensor, write_mask: Tensor, keep: Tensor) -> Tensor:
    """The cache with token t's row put where write_mask's column t says; no dynamic index, so any T and any slots.

    Args: cache [1, kv_heads, S, head_dim]; new [1, kv_heads, T, head_dim]; write_mask [1, 1, S, T];
    keep [1, 1, S, 1] = 1 - sum_t write_mask.
    """
    return cache * keep + torch.matmul(write_mask, new)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention, all query heads of a key/value head in one matrix product.

    Args: q [1, kv_heads, group * T, head_dim], already scaled; k, v [1, kv_heads, S, head_dim];
    mask [1, 1, group * T, S], additive. Returns [1, kv_heads, group * T, head_dim].
    """
    scores = torch.matmul(q, k.transpose(-1, -2)) + mask  # [1, kv_heads, group * T, S]
    return torch.matmul(torch.softmax(scores, dim=-1), v)


class GatedMLP(nn.Module):
    """down(silu(gate) * up), gate and up in one projection of [2 * ffn, hidden] rows."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = projection(gate_up), projection(down)
        self.ffn = down.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.split(self.gate_up_proj(x), self.ffn, dim=1)  # each [1, ffn, T, 1]
        down: Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return down
