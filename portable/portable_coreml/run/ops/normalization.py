"""Normalisations. Statistics are computed in float32 whatever the program's type, as they are on every Core ML
backend.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_coreml.run.ops.registry import Ints, kernel


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


@kernel("layer_norm")
def layer_norm(
    x: Tensor, axes: Ints | None = None, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    dims = list(range(x.dim())) if axes is None else sorted(int(a) % x.dim() for a in axes)
    shape = [x.shape[d] for d in dims]
    if dims == list(range(x.dim() - len(dims), x.dim())):
        return F.layer_norm(x, shape, gamma, beta, epsilon)
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    spread = [x.shape[d] if d in dims else 1 for d in range(x.dim())]
    out = (x - mean) * torch.rsqrt(variance + epsilon)
    out = out if gamma is None else out * gamma.reshape(spread)
    return out if beta is None else out + beta.reshape(spread)


@kernel("l2_norm")
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    axes = list(range(x.dim() - 3, x.dim())) if x.dim() >= 3 else list(range(x.dim()))
    return x * torch.rsqrt(torch.sum(torch.square(x), axes, keepdim=True) + epsilon)


@kernel("local_response_norm")
def local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    return F.local_response_norm(x, size, alpha, beta, k)
