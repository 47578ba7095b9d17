"""Turns a checkpoint's values into a block of a constant, and back, as a `TensorSource` describes.

A block is made a few rows at a time, so everything here works on rows alone; only a magnitude needs the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardmill.models.architecture import TensorSource

MATRIX = 2


def picked(stored: Tensor, source: TensorSource) -> Tensor:
    """Return the rows that make up a block: [rows, columns] or [rows], a view of the values that were read."""
    if source.column is not None:
        stored = stored[..., source.column]
        stored = stored.reshape([extent for extent in stored.shape if extent > 1])
    if source.transposed:
        stored = stored.T
    if source.rows is not None:
        first, stop, pace = source.rows
        stored = stored[first:stop:pace]
    return stored


def magnitude(values: Tensor) -> float:
    """Return the least power of two that no value exceeds; dividing by it loses nothing. 1 if all values are zero."""
    largest = float(values.abs().max())
    return 2.0 ** math.ceil(math.log2(largest)) if largest else 1.0


def adjusted(rows: Tensor, source: TensorSource, beside: Sequence[Tensor] = (), size: float = 1.0) -> Tensor:
    """Return rows of a block, given rows from `picked`; in fp32 if they change.

    Args:
        rows: in any float dtype.
        source: of the block.
        beside: the values of the tensors `plus` and `by`, if the source names them.
        size: the matrix' magnitude, if the source asks for it.
    """
    if source.magnitude == "only":
        return torch.full((source.repeat,), size)
    if source.repeat > 1:
        rows = rows.repeat_interleave(source.repeat, dim=0)
    if source.softplus:
        rows = torch.nn.functional.softplus(rows.float())
    if source.exp:
        rows = rows.float().exp()
    if not (source.plus or source.by or source.magnitude) and (source.add, source.times) == (0.0, 1.0):
        return rows
    rows, vectors = rows.float(), iter(beside)
    if source.plus:
        rows = rows + next(vectors).float()
    if source.by:
        rows = rows * next(vectors).float()
    return (rows + source.add) * (source.times / (size if source.magnitude else 1.0))


def undone(rows: Tensor, source: TensorSource, beside: Sequence[Tensor] = (), size: float = 1.0) -> Tensor:
    """Return the checkpoint's rows, given rows from `adjusted` without repeats; may return its argument unchanged."""
    if (size, source.times, source.add) != (1.0, 1.0, 0.0):
        rows = rows * (size / source.times) - source.add
    if source.softplus:  # y + log(1 - exp(-y))
        rows = rows.float() + torch.log(-torch.expm1(-rows.float()))
    if source.exp:
        rows = rows.float().log()
    vectors = list(beside)
    if source.by:
        rows = rows / vectors[-1].float()
    return rows - vectors[0].float() if source.plus else rows


def turned(stored: Tensor, source: TensorSource, beside: Sequence[Tensor] = ()) -> Tensor:
    """Return a whole block, given the checkpoint's values of the shape that the source reads."""
    rows = picked(stored, source)
    return adjusted(rows, source, beside, magnitude(rows) if source.magnitude else 1.0)


def assembled(blocks: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Assemble a constant from its blocks, one below the other, or side by side if they are narrower."""
    side_by_side = len(shape) == MATRIX and len(blocks) > 1 and blocks[0].shape[-1] != shape[-1]
    return torch.cat(list(blocks), dim=1 if side_by_side else 0).reshape(shape)


def put_back(target: Tensor, values: Tensor, source: TensorSource, size: float = 1.0) -> None:
    """Write the checkpoint's values behind a block to their places in the checkpoint's tensor.

    Args:
        target: values of the shape that the source reads.
        values: the block as a program has it.
        source: of the block; it names neither `plus` nor `by`.
        size: the matrix' magnitude, if the block was divided by it.
    """
    original = undone(values[:: source.repeat], source, size=size)
    place = target
    if source.column is not None:
        place = place[..., source.column]
    if source.transposed:
        place = place.T
    if source.rows is not None:
        first, stop, pace = source.rows
        place = place[first:stop:pace]
    place.copy_(original.reshape(place.shape))
