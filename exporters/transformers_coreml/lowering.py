"""What takes the place of operators that coremltools 9.0 lacks or gets wrong, traced by torch before the conversion.

Each function computes what its operator does, from operators that coremltools converts rightly; `NotImplemented` leaves
the operator as it is. docs/upstream.md has the faults of coremltools with a reproduction of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GELU = math.sqrt(2 / math.pi), 0.044715  # of the approximation by tanh
REPLACEMENTS: dict[str, Callable[..., Any]] = {}  # by the operator's name in torch.ops


def _replaces(*operators: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        REPLACEMENTS.update(dict.fromkeys(operators, function))
        return function

    return note


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the replacements by operator, as `ExportedProgram.run_decompositions` takes them.

    An operator that this build of torch or transformers lacks is left out.
    """
    by_operator = {}
    for name, function in REPLACEMENTS.items():
        space, packet, overload = name.split(".")
        operator = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
        if operator is not None:
            by_operator[operator] = function
    return by_operator


@_replaces("aten.gelu.default")
def gelu(x: Tensor, *, approximate: str = "none") -> Any:
    """Spell the approximation by tanh: coremltools reads no keyword, and computes erf in its place."""
    if approximate != "tanh":
        return NotImplemented
    root, cube = GELU
    return 0.5 * x * (1 + torch.tanh(root * (x + cube * x * x * x)))


@_replaces("aten.where.ScalarOther")
def where_scalar_other(condition: Tensor, x: Tensor, other: float) -> Tensor:
    """Choose between a tensor and a number."""
    return torch.where(condition, x, torch.full_like(x, other))


@_replaces("aten.where.ScalarSelf")
def where_scalar_self(condition: Tensor, x: float, other: Tensor) -> Tensor:
    """Choose between a number and a tensor."""
    return torch.where(condition, torch.full_like(other, x), other)


@_replaces("aten.where.Scalar")
def where_scalar(condition: Tensor, x: float, other: float) -> Tensor:
    """Choose between two numbers."""
    first, second = (torch.full(condition.shape, number, dtype=torch.get_default_dtype()) for number in (x, other))
    return torch.where(condition, first, second)


@_replaces("aten.bucketize.Tensor")
def bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Count the boundaries below each number."""
    return _count(_below(boundaries, x, right), out_int32)


@_replaces("aten.searchsorted.Tensor")
def searchsorted(
    edges: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    """Count the sorted edges below each number."""
    if sorter is not None:
        return NotImplemented
    return _count(_below(edges.unsqueeze(-2) if edges.dim() > 1 else edges, x, right or side == "right"), out_int32)


def _below(edges: Tensor, x: Tensor, right: bool) -> Tensor:
    return x.unsqueeze(-1) >= edges if right else x.unsqueeze(-1) > edges


def _count(hits: Tensor, out_int32: bool) -> Tensor:
    return hits.to(torch.int32).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


@_replaces("aten.histc.default")
def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Count whole numbers in bins of one, as routers count the tokens of an expert."""
    if max - min != bins - 1:
        return NotImplemented
    values = torch.arange(bins, dtype=x.dtype) + min
    return (x.reshape(-1, 1) == values).to(torch.float32).sum(0).to(x.dtype)


@_replaces("transformers.grouped_mm_fallback.default")
def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiply every row with every expert's matrix, and keep the product with the row's own.

    Args:
        x: [n, d], ordered by expert.
        weight: [experts, d, out].
        offs: [experts], where each expert's rows end.
    """
    rows = torch.arange(x.shape[0]).unsqueeze(0)
    first = torch.cat([torch.zeros_like(offs[:1]), offs[:-1]])
    of_expert = torch.logical_and(rows >= first.unsqueeze(1), rows < offs.unsqueeze(1)).to(x.dtype)
    return (torch.matmul(x.unsqueeze(0), weight) * of_expert.unsqueeze(-1)).sum(0)


@_replaces("aten.diff.default")
def diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None) -> Any:
    """Subtract each element from the next one."""
    if n != 1 or prepend is not None or append is not None:
        return NotImplemented
    count = x.shape[dim] - 1
    return x.narrow(dim, 1, count) - x.narrow(dim, 0, count)


@_replaces("aten.multiply.Tensor")
def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Multiply: another name of `mul`."""
    return x * y


@_replaces("aten.new_ones.default")
def new_ones(x: Tensor, size: list[int], **options: Any) -> Tensor:
    """Return ones."""
    return torch.ones(size, dtype=options.get("dtype") or x.dtype)


@_replaces("aten._safe_softmax.default")
def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the softmax, and zeros where a row has nothing but -inf."""
    x = x if dtype is None else x.to(dtype)
    nothing = (x == float("-inf")).all(dim, keepdim=True)
    return torch.where(nothing, torch.zeros_like(x), torch.softmax(x.clamp(min=torch.finfo(x.dtype).min), dim))


@_replaces("aten.isin.Tensor_Tensor")
def isin(x: Tensor, options: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Compare with each option."""
    hit = (x.unsqueeze(-1) == options.reshape(-1)).any(-1)
    return torch.logical_not(hit) if invert else hit


@_replaces("aten.unfold.default")
def unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Select the windows of an axis, which become a last axis."""
    dim = dim % x.dim()
    count = (x.shape[dim] - size) // step + 1
    rows = torch.arange(count).unsqueeze(1) * step + torch.arange(size).unsqueeze(0)
    windows = torch.index_select(x, dim, rows.reshape(-1)).reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :])
    return windows.movedim(dim + 1, -1)


@_replaces("aten.index_add.default")
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Add rows at their places, by a product with a matrix of zeros and ones."""
    places = (torch.arange(x.shape[dim]).unsqueeze(1) == index.unsqueeze(0)).to(x.dtype)
    rows = source.movedim(dim, 0)
    added = (places @ rows.reshape(rows.shape[0], -1)).reshape(x.shape[dim], *rows.shape[1:])
    return x + alpha * added.movedim(0, dim)


@_replaces("aten.alias.default", "aten.lift_fresh_copy.default", "aten.detach.default")
def copied(x: Tensor) -> Tensor:
    """Return the same numbers."""
    return x.clone()
