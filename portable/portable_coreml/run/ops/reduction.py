"""Reductions, softmax, ordering (argsort, topk) and cumulative sums. `axes` absent means all axes."""

from __future__ import annotations

from collections.abc import Callable

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


def _reduction(kind: str, call: Callable[[Tensor, list[int], bool], Tensor], exact: bool = False) -> None:
    """Register a reduction: of a tensor, over axes, keeping the reduced axes as axes of size 1 or not."""

    @kernel(kind, exact=exact)
    def reduce(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
        return call(x, list(range(x.dim())) if axes is None else [int(a) % max(x.dim(), 1) for a in axes], keep_dims)


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not x.is_floating_point():
        return torch.mean(x.to(torch.float64), axes, keepdim=keep).to(x.dtype)
    return torch.mean(x, axes, keepdim=keep)


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


_reduction("reduce_mean", _mean)
_reduction("reduce_prod", _product)
_reduction("reduce_sum", lambda x, axes, keep: torch.sum(x, axes, keepdim=keep))
_reduction("reduce_max", lambda x, axes, keep: torch.amax(x, axes, keepdim=keep), exact=True)
_reduction("reduce_min", lambda x, axes, keep: torch.amin(x, axes, keepdim=keep), exact=True)
_reduction("reduce_sum_square", lambda x, axes, keep: torch.sum(torch.square(x), axes, keepdim=keep))
_reduction("reduce_l1_norm", lambda x, axes, keep: torch.sum(torch.abs(x), axes, keepdim=keep))
_reduction("reduce_l2_norm", lambda x, axes, keep: torch.sqrt(torch.sum(torch.square(x.float()), axes, keepdim=keep)))
_reduction("reduce_log_sum", lambda x, axes, keep: torch.log(torch.sum(x, axes, keepdim=keep)))
_reduction("reduce_log_sum_exp", lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep))


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
