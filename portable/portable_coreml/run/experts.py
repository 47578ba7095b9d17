"""Computes an expert only for the tokens that take it.

In a program every expert of a mixture runs for every token. It computes  down(hidden(x) * weight), where the weight is
0 for each token that does not take the expert. Zero times a finite number adds nothing, so these tokens are left out
as long as no number can be infinite. If a number could be infinite, the whole formula is computed, since 0 * inf is
NaN in the formula, as on a device. For the same reason this works in float32 only: an overflow in fp16 is known only
after the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from portable_coreml.run.lowered import LoweredStep, call_kernel, kernel_values
from portable_coreml.run.products import BLOCK, DIGITS, product, takes_digits, to_digits
from portable_coreml.run.stored import StoredMatrix

LARGEST = 1e9  # bound of a first product: results of two such products, and a third power, are finite in float32
INT8_MAX = 128.0
Matrix = StoredMatrix | Tensor


@dataclass(frozen=True, eq=False)
class First:
    """The first matrix of each expert, the experts' biases [experts, rows], and the name of the product."""

    name: str
    matrices: tuple[Matrix, ...]
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Group:
    """Experts that run together.

    Attributes:
        first: the experts' first matrices.
        chain: the elementwise steps after the first products.
        factor: [experts, rows], multiplies the weighted results of the chain.
        down: the last matrix of each expert.
        bias: the bias of the sum, [out].
        most: the largest `reach` of a first matrix.
    """

    first: tuple[First, ...]
    chain: tuple[LoweredStep, ...]
    factor: Tensor | None
    down: tuple[Matrix, ...]
    bias: Tensor | None
    most: float

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the sum of the experts' results.

        Args:
            x: [1, d, T, 1].
            weight: the experts' weights for every token, one expert after the other.

        Returns:
            [1, out, T, 1].
        """
        tokens = x.reshape(x.shape[1], -1).t()  # [T, d]
        shares = weight.reshape(len(self.down), -1)  # [experts, T]
        bounded = float(x.abs().max()) * self.most < LARGEST  # false for NaN
        taken = shares != 0 if bounded else torch.ones_like(shares, dtype=torch.bool)
        expert, at = taken.nonzero(as_tuple=True)  # N pairs, one expert after the other
        out = torch.zeros(len(tokens), height(self.down[0]))
        if len(at):
            counts: list[int] = taken.sum(1).tolist()
            hidden = self._hidden(tokens[at], expert, counts) * shares[expert, at][:, None]  # [N, rows]
            hidden = hidden if self.factor is None else hidden * self.factor[expert]
            out.index_add_(0, at, _by_expert(self.down, _Rows.of(hidden, self.down), counts))
        return (out if self.bias is None else out + self.bias).t()[None, :, :, None]

    def _hidden(self, tokens: Tensor, expert: Tensor, counts: Sequence[int]) -> Tensor:
        """Return tokens [N, d] after the first matrices and the chain: [N, rows]."""
        rows = _Rows.of(tokens, [matrix for first in self.first for matrix in first.matrices])
        env: dict[str, Any] = {}
        for first in self.first:
            y = _by_expert(first.matrices, rows, counts)
            env[first.name] = y if first.bias is None else y + first.bias[expert]
        for step in self.chain:
            assert step.kernel is not None
            env[step.outputs[0].name] = call_kernel(step.kernel, kernel_values(step, env))
        hidden: Tensor = env[self.chain[-1].outputs[0].name]
        return hidden


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows [N, in], also in fixed point if a matrix takes digits and the rows are finite.

    The fixed-point form is digits [4 N, in] and factors [N, 1].
    """

    values: Tensor
    digits: Tensor | None
    factor: Tensor | None

    @staticmethod
    def of(values: Tensor, matrices: Sequence[Matrix]) -> _Rows:
        found = to_digits(values.t()) if any(map(takes_digits, matrices)) else None
        if found is None:
            return _Rows(values, None, None)
        integers = found.integers.t().contiguous()  # [N, in]
        digits = integers.view(torch.int8).view(*integers.shape, 4).transpose(1, 2).contiguous()
        return _Rows(values, digits.view(-1, integers.shape[1]), torch.exp2(found.exponent)[:, None])


def _by_expert(matrices: Sequence[Matrix], rows: _Rows, counts: Sequence[int]) -> Tensor:
    """Return each expert's rows through its matrix: [N, out]. The first counts[0] rows belong to the first expert."""
    made, begin = torch.empty(len(rows.values), height(matrices[0])), 0
    for matrix, count in ((matrix, count) for matrix, count in zip(matrices, counts, strict=True) if count):
        some = slice(begin, begin := begin + count)
        if rows.digits is not None and rows.factor is not None and takes_digits(matrix):
            assert isinstance(matrix, StoredMatrix) and matrix.scale is not None
            digits = rows.digits[4 * some.start : 4 * some.stop]
            sums = torch._int_mm(matrix.values, digits.t()).float()  # [out, 4 n]
            whole = torch.mv(sums.view(-1, 4), DIGITS).view(-1, count).t()  # [n, out]
            torch.mul(whole, matrix.scale[:, 0], out=made[some]).mul_(rows.factor[some])
        else:
            made[some] = product(matrix, rows.values[some].t(), steady=False).t()
    return made


def height(matrix: Matrix) -> int:
    """Return how many rows a matrix has."""
    return len(matrix) if isinstance(matrix, Tensor) else len(matrix.values)


def reach(matrix: Matrix) -> float:
    """Return a bound of the product with a column whose numbers are at most 1 in magnitude.

    An int8 matrix is bounded by its scales, and not read. A matrix of fp16 numbers is read once, since any number
    may be 65504: with that bound, inputs of magnitude 4 and more would be taken for a cause of infinities.
    """
    if isinstance(matrix, StoredMatrix) and matrix.scale is not None:
        return matrix.values.shape[1] * INT8_MAX * float(matrix.scale.abs().max())
    values = matrix if isinstance(matrix, Tensor) else matrix.values
    sums = [rows.float().abs().sum(1).max() for rows in torch.split(values, max(1, BLOCK // values.shape[1]))]
    return float(torch.stack(sums).max())  # NaN if there is a NaN
