"""Multiplies matrices of fp16 weights with rows of inputs in float32, by FBGEMM's kernel.

The kernel reads a packed copy in fp16. A thread that expands a matrix to float32 for each product takes five to ten
times as long for few rows. Sums are in float32, in another order than BLAS adds them up: so a matrix has a copy from
its first product on, or never, and no result depends on how often a program ran.

The kernel adds up one or two rows in another way than four. Rows are multiplied by fours, so a row's bits do not depend
on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from portable_coreml.run.packed import Packed
from portable_coreml.run.pieces import in_pieces

FOUR = 4  # rows that are multiplied at a time
_PIECE = 1 << 20  # elements of a packed copy: one thread expands, packs and multiplies them at a time
_MOST = 65504.0  # the largest fp16 number; packing clips infinite weights to it


def may_be_copied(packed: Packed) -> bool:
    """Return whether a matrix may have a copy: there is a kernel, and the matrix gives its memory back.

    A palette's numbers, or int4 in a byte each, would stay in memory beside a copy.
    """
    return packed.is_mapped and fp16_copies_are_right()


def fp16_product(x: Tensor, size: int, weights: Callable[[int, int], Tensor], packed: Packed) -> Tensor | None:
    """Return x @ matrix.T, [n, out] in float32; None if a weight is not finite.

    Args:
        x: rows of inputs [n, in] in float32; n is a multiple of 4.
        size: of the matrix [out, in], how many rows it has.
        weights: gives some rows of the matrix, from the first to before the last, in float32: fp16 numbers all.
        packed: holds the matrix's copy.
    """
    rows = max(1, _PIECE // x.shape[1])
    pieces = packed.earned(0, lambda: _pack(size, rows, weights))
    if not pieces:
        return None
    out = torch.empty(len(x), size)

    def multiply(first: int, last: int) -> None:
        for four in range(0, len(x), FOUR):
            out[four : four + FOUR, first:last] = _multiplied(x[four : four + FOUR], pieces[first // rows])

    in_pieces(multiply, size, rows)
    return out


def _pack(out: int, rows: int, weights: Callable[[int, int], Tensor]) -> tuple[Any, ...]:
    """Return the copies of a matrix, each of some rows; none if a weight is not finite."""
    made: list[Any] = [None] * -(-out // rows)

    def pack(first: int, last: int) -> None:
        block = weights(first, last)
        lowest, highest = map(float, block.aminmax())  # NaN if a weight is
        if lowest >= -_MOST and highest <= _MOST:
            made[first // rows] = torch.ops.quantized.linear_prepack_fp16(block, None)

    in_pieces(pack, out, rows)
    return () if any(piece is None for piece in made) else tuple(made)


def _multiplied(x: Tensor, piece: Any) -> Tensor:
    products: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, piece)
    return products


@cache
def fp16_copies_are_right() -> bool:
    """Return whether this processor and this torch have the kernel, and it gives a row's exact sums.

    Sums of small whole numbers are exact in any order, so they show a wrong kernel and not its rounding.
    """
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randint(-9, 10, (37, 100), generator=generator).float()
    x = torch.randint(-9, 10, (FOUR, 100), generator=generator).float()
    try:
        return torch.equal(_multiplied(x, torch.ops.quantized.linear_prepack_fp16(matrix, None)), x @ matrix.t())
    except (AttributeError, RuntimeError):  # another processor, or a torch without it
        return False
