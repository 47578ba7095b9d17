"""Reductions, softmax, ordering (argsort, topk) and cumulative sums. `axes` absent means all axes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_coreml.run.ops.registry import Ints, kernel


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


def _axes(x: Tensor, axes: Ints | None) -> list[int]:
    return list(range(x.dim())) if axes is None else [int(a) % max(x.dim(), 1) for a in axes]


@kernel("reduce_sum")
def reduce_sum(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
    return torch.sum(x, _axes(x, axes), keepdim=keep_dims)


@kernel("reduce_mean")
def reduce_mean(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
    if not x.is_floating_point():
        return torch.mean(x.to(torch.float64), _axes(x, axes), keepdim=keep_dims).to(x.dtype)
    return torch.mean(x, _axes(x, axes), keepdim=keep_dims)


@kernel("reduce_max", exact=True)
def reduce_max(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
    return torch.amax(x, _axes(x, axes), keepdim=keep_dims)


@kernel("reduce_min", exact=True)
def reduce_min(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
    return torch.amin(x, _axes(x, axes), keepdim=keep_dims)


@kernel("reduce_prod")
def reduce_prod(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
    out = x
    for axis in sorted(_axes(x, axes), reverse=True):
        out = torch.prod(out, axis, keepdim=keep_dims)
    return out


@kernel("reduce_sum_square")
def reduce_sum_square(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
    return torch.sum(torch.square(x), _axes(x, axes), keepdim=keep_dims)


@kernel("reduce_l1_norm")
def reduce_l1_norm(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
    return torch.sum(torch.abs(x), _axes(x, axes), keepdim=keep_dims)


@kernel("reduce_l2_norm")
def reduce_l2_norm(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
    return torch.sqrt(torch.sum(torch.square(x.to(torch.float32)), _axes(x, axes), keepdim=keep_dims))


@kernel("reduce_log_sum")
def reduce_log_sum(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
    return torch.log(torch.sum(x, _axes(x, axes), keepdim=keep_dims))


@kernel("reduce_log_sum_exp")
def reduce_log_sum_exp(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
    return torch.logsumexp(x, _axes(x, axes), keepdim=keep_dims)


@kernel("reduce_argmax")
def reduce_argmax(x: Tensor, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32") -> Tensor:
    return torch.argmax(x, axis, keepdim=keep_dims).to(torch.int32)


@kernel("reduce_argmin")
def reduce_argmin(x: Tensor, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32") -> Tensor:
    return torch.argmin(x, axis, keepdim=keep_dims).to(torch.int32)


@kernel("softmax")
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


@kernel("argsort")
def argsort(x: Tensor, axis: int = -1, ascending: bool = False) -> Tensor:
    return torch.sort(x, dim=axis, descending=not ascending, stable=True)[1].to(torch.int32)


@kernel("topk")
def topk(
    x: Tensor,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> tuple[Tensor, ...]:
    size = x.shape[axis] if k == -1 else k
    values, indices = torch.sort(x, dim=axis, descending=not ascending, stable=True)
    values, indices = values.narrow(axis, 0, size), indices.narrow(axis, 0, size)
    return (values, indices.to(torch.int32)) if return_indices else (values,)


@kernel("cumsum")
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    source = torch.flip(x, [axis]) if reverse else x
    total = torch.cumsum(source, axis)
    if exclusive:
        total = total - source
    return torch.flip(total, [axis]) if reverse else total
