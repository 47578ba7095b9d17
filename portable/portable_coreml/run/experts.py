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

from portable_coreml.run.lowered import Step, call_kernel, kernel_values
from portable_coreml.run.products import product
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

    def made(self, x: Tensor, weight: Tensor) -> Tensor:
        """What it adds for tokens [d, n] that take it by weights [n]: [n, d_out]."""
        env: dict[str, Any] = {}
        for first in self.first:
            y = product(first.matrix, x, steady=False)
            env[first.name] = (y if first.bias is None else y + first.bias)[None, :, :, None]
        for step in self.chain:
            assert step.kernel is not None
            env[step.outputs[0].name] = call_kernel(step.kernel, kernel_values(step, env))
        hidden: Tensor = env[self.chain[-1].outputs[0].name][0, :, :, 0] * weight
        return product(self.down, hidden if self.factor is None else hidden * self.factor, steady=False).t()


def height(matrix: Matrix) -> int:
    """How many rows a matrix has."""
    return len(matrix) if isinstance(matrix, Tensor) else len(matrix.values)


def reach(matrix: Matrix) -> float:
    """A bound of the product with a column of ones. No weight file has to be read for it."""
    if isinstance(matrix, Tensor):
        return float(matrix.abs().sum(1).max())
    largest = HALF_MAX if matrix.scale is None else INT8_MAX * float(matrix.scale.abs().max())
    return matrix.values.shape[1] * largest


def together(experts: Sequence[Expert], most: float, bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """What experts add up to.

    Args:
        experts: the experts.
        most: the largest `reach` of their first matrices.
        bias: of the sum, [d_out, 1].
        x: [1, d, T, 1].
        weight: the experts' for every token, one expert after the other.

    Returns:
        [1, d_out, T, 1].
    """
    columns = x.reshape(x.shape[1], -1)  # [d, T]
    shares = weight.reshape(len(experts), -1)  # [experts, T]
    bounded = float(columns.abs().max()) * most < LARGEST  # false for NaN
    taken = shares != 0 if bounded else torch.ones_like(shares, dtype=torch.bool)
    out = torch.zeros(columns.shape[1], height(experts[0].down))
    for i in taken.any(1).nonzero()[:, 0].tolist():
        at = taken[i].nonzero()[:, 0]
        out.index_add_(0, at, experts[i].made(columns[:, at], shares[i, at]))
    total = out.t() if bias is None else out.t() + bias
    return total[None, :, :, None]
