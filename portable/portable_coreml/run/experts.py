"""Computes an expert for the tokens that take it, instead of for all.

In a program every expert of a mixture runs for every token: it computes  down(hidden(x) * weight), where the weight is
0 for all tokens but those that take the expert. Zero times a finite number adds nothing, so the other tokens are left
out, as long as no number can be infinite. Where one could be, the whole formula is computed, since 0 * inf is NaN in
it, as on a device. For the same reason this is for float32 only: what overflows in fp16 is known only once it is
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from portable_coreml.run.apart import each
from portable_coreml.run.lowered import Step, call_kernel, kernel_values
from portable_coreml.run.products import (
    MOST_COLUMNS,
    Digits,
    digit_product,
    int8_products_are_exact,
    product,
    takes_digits,
    to_digits,
)
from portable_coreml.run.stored import StoredMatrix

LARGEST = 1e9  # of a first product: what is made of two of them, and a third power, is finite in float32
HALF_MAX, INT8_MAX = 65504.0, 128.0
Matrix = StoredMatrix | Tensor


@dataclass(frozen=True, eq=False)
class First:
    """A matrix that an expert starts with, its bias [rows, 1], and the name of what they make."""

    name: str
    matrix: Matrix
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Expert:
    """One expert.

    Attributes:
        first: its first matrices.
        chain: what is made of their products, number by number.
        factor: [rows, 1], which what they made is multiplied with.
        down: its last matrix.
    """

    first: tuple[First, ...]
    chain: tuple[Step, ...]
    factor: Tensor | None
    down: Matrix

    def made(self, x: Tensor, digits: Digits | None, at: Tensor, weight: Tensor) -> Tensor:
        """What it adds for tokens that take it: [out, n].

        Args:
            x: all tokens, [d, T].
            digits: the same in fixed point, if they are.
            at: which of them take it, [n].
            weight: by which they do, [n].
        """
        env: dict[str, Any] = {}
        few = digits is not None and len(at) <= MOST_COLUMNS and all(takes_digits(f.matrix) for f in self.first)
        some = digits.take(at) if few and digits is not None else x.index_select(1, at)
        for first in self.first:
            y = _product(first.matrix, some)
            env[first.name] = (y if first.bias is None else y.add_(first.bias))[None, :, :, None]
        for step in self.chain:
            assert step.kernel is not None
            env[step.outputs[0].name] = call_kernel(step.kernel, kernel_values(step, env))
        hidden: Tensor = env[self.chain[-1].outputs[0].name][0, :, :, 0] * weight
        return product(self.down, hidden if self.factor is None else hidden * self.factor, steady=False)


def _product(matrix: Matrix, x: Tensor | Digits) -> Tensor:
    """matrix @ x, [rows, n]."""
    if isinstance(x, Digits):
        assert isinstance(matrix, StoredMatrix)
        return digit_product(matrix, x)
    return product(matrix, x, steady=False)


def height(matrix: Matrix) -> int:
    """How many rows a matrix has."""
    return len(matrix) if isinstance(matrix, Tensor) else len(matrix.values)


def reach(matrix: Matrix) -> float:
    """A bound of the product with a column of ones. No weight file has to be read for it."""
    if isinstance(matrix, Tensor):
        return float(matrix.abs().sum(1).max())
    largest = HALF_MAX if matrix.scale is None else INT8_MAX * float(matrix.scale.abs().max())
    return matrix.values.shape[1] * largest


def in_digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [1, d, T, 1] in fixed point, once for all experts: integers [d, T] and exponents [T], or none of either."""
    columns = x.reshape(x.shape[1], -1)
    digits = to_digits(columns) if int8_products_are_exact() else None
    if digits is None:
        return columns.new_empty((len(columns), 0), dtype=torch.int32), columns.new_empty(0, dtype=torch.int32)
    return digits.integers, digits.exponent


def together(
    experts: Sequence[Expert],
    most: float,
    bias: Tensor | None,
    x: Tensor,
    weight: Tensor,
    integers: Tensor,
    exponent: Tensor,
) -> Tensor:
    """What experts add up to.

    Args:
        experts: the experts.
        most: the largest `reach` of their first matrices.
        bias: of the sum, [out, 1].
        x: [1, d, T, 1].
        weight: the experts' for every token, one expert after the other.
        integers: what `in_digits` makes of x.
        exponent: likewise.

    Returns:
        [1, out, T, 1].
    """
    columns = x.reshape(x.shape[1], -1)  # [d, T]
    shares = weight.reshape(len(experts), -1)  # [experts, T]
    bounded = float(columns.abs().max()) * most < LARGEST  # false for NaN
    taken = shares != 0 if bounded else torch.ones_like(shares, dtype=torch.bool)
    digits = Digits(integers, exponent) if len(exponent) else None
    places = {i: taken[i].nonzero()[:, 0] for i in taken.any(1).nonzero()[:, 0].tolist()}

    def made(i: int) -> Tensor:
        return experts[i].made(columns, digits, places[i], shares[i, places[i]])

    out = torch.zeros(height(experts[0].down), columns.shape[1])
    for at, some in zip(places.values(), each(made, list(places)), strict=True):
        out.index_add_(1, at, some)
    return (out if bias is None else out + bias)[None, :, :, None]
