"""Rows of a constant, read from the checkpoint's byte ranges a block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from shardmill.convert.weights import DTYPES, beside
from shardmill.errors import CheckpointError
from shardmill.models.sources import turned
from shardmill.plan import Constant

EIGHT = 8  # rows that end on a whole byte, whatever their numbers' bits and however many columns there are


@dataclass(frozen=True)
class Band:
    """Blocks of a constant that lie side by side: all of its rows from `row` on, up to the next band."""

    tensors: tuple[Constant, ...]
    row: int = 0

    @property
    def whole(self) -> bool:
        """Whether the rows have to be made all at once, because they do not lie one after the other."""
        return any(map(_is_scattered, self.tensors))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns; a vector is one row."""
        first = self.tensors[0].shape
        if len(first) == 1:
            return 1, first[0]
        return first[0], sum(math.prod(tensor.shape[1:]) for tensor in self.tensors)

    @property
    def label(self) -> str:
        """What a person calls it."""
        return self.tensors[0].label

    def step(self, size: int) -> int:
        """How many rows are read at a time, of about `size` numbers."""
        rows, columns = self.shape
        return rows if self.whole else max(1, size // columns // EIGHT) * EIGHT

    def starts(self, size: int) -> range:
        """The first row of each block."""
        return range(0, self.shape[0], self.step(size))

    def read(self, row: int, size: int, source: Path) -> torch.Tensor:
        """The rows [n, columns] of the block that starts at `row`, in the checkpoint's dtype or fp32.

        Raises:
            CheckpointError: the file ends within them.
        """
        count, columns = min(self.step(size), self.shape[0] - row), self.shape[1]
        found = [_rows_of(tensor, row, count, source) for tensor in self.tensors]
        return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).reshape(count, columns).contiguous()


def bands(tensors: Sequence[Constant]) -> list[Band]:
    """The bands of one constant's blocks, from the first row on."""
    found: dict[int, list[Constant]] = {}
    for tensor in tensors:
        found.setdefault(tensor.at[0], []).append(tensor)
    return [Band(tuple(band), row) for row, band in sorted(found.items())]


def in_groups(found: Sequence[Band], unit: int, size: int, source: Path) -> Iterator[tuple[Band, torch.Tensor]]:
    """All rows of a constant in order, in fp32, each time with the band that the last of them is from.

    Args:
        found: its bands.
        unit: how many rows at a time, or a multiple of it; what is left comes last.
        size: how many numbers are read at a time, about.
        source: the checkpoint's folder.
    """
    kept = torch.empty(0, found[0].shape[1])
    for band in found:
        for row in band.starts(size):
            kept = torch.cat([kept, band.read(row, size, source).float()])
            full = len(kept) - len(kept) % unit
            if full:
                yield band, kept[:full]
            kept = kept[full:]
    if len(kept):
        yield found[-1], kept


def _rows_of(tensor: Constant, row: int, count: int, source: Path) -> torch.Tensor:
    """Rows [row, row + count) of a block; all of them where they do not lie one after the other."""
    if len(tensor.shape) == 1 or _is_scattered(tensor):
        return turned(_read(tensor, 0, tensor.stored[0], source), tensor.source, beside(tensor, source))
    first = tensor.source.rows[0] if tensor.source.rows else 0
    stored = _read(tensor, first + row, count, source)
    return turned(stored, replace(tensor.source, rows=None), beside(tensor, source))


def _is_scattered(tensor: Constant) -> bool:
    """Whether a block's rows do not lie one after the other, or depend on all of them."""
    source = tensor.source
    strided = source.rows is not None and source.rows[2] != 1
    return source.transposed or strided or source.repeat > 1 or bool(source.magnitude)


def _read(tensor: Constant, row: int, count: int, source: Path) -> torch.Tensor:
    """Rows [row, row + count) of a block's bytes as they lie in the checkpoint: [count, ...]."""
    dtype, rest = DTYPES[tensor.dtype], tensor.stored[1:]
    stride = math.prod(rest) * dtype.itemsize
    raw = np.empty(count * stride, np.uint8)
    with (source / tensor.file).open("rb", buffering=0) as stream:
        stream.seek(tensor.start + row * stride)
        if stream.readinto(raw.data) != raw.size:
            raise CheckpointError(f"{tensor.file}: ends within {tensor.label}; fetch it again")
    return torch.from_numpy(raw).view(dtype).reshape(count, *rest)
