"""fp16 mode: products and sums whose order of summation depends on shapes are added up in float64.

Otherwise the last bit of a token's result would sometimes depend on how many tokens are fed in the same pass. torch
adds in another order then, and the one rounding to fp16 may go the other way. In float64 the order no longer matters.
Products with constant matrices are computed in products.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from portable_coreml.run.ops import KERNELS, Kernel

KINDS = (
    "einsum",
    "matmul",
    "reduce_l2_norm",
    "reduce_mean",
    "reduce_sum",
    "reduce_sum_square",
    "scaled_dot_product_attention",
)


def _widened(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel that computes in float64; its result is rounded from there."""

    def wide(*values: Any) -> Tensor:
        return call(*(_double(value) for value in values))

    return wide


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [_double(item) for item in value]
    return value


WIDE = {kind: Kernel(f"wide_{kind}", _widened(KERNELS[kind].call), KERNELS[kind].params) for kind in KINDS}
