"""A constant as a package stores it, expanded to fp32 a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmill.forms.form import Form

FP16_STEP = 2**-24  # between neighbouring fp16 numbers near 0
BLOCK = 8_000_000  # numbers of a matrix in fp32 at a time: glibc reuses blocks of up to 32 MB, and frees larger ones


def rows_at_once(columns: int) -> int:
    """Return how many rows of a matrix make a block of BLOCK numbers; at least one."""
    return max(1, BLOCK // columns)


@dataclass(frozen=True)
class Stored:
    """A constant's stored numbers: fp16 values, or codes with their scales or palettes.

    Attributes:
        values: fp16, or codes of a matrix [out, in]: integers to be scaled, or indices into tables.
        scale: the quantisation step of each output channel, [out, 1].
        tables: a palette's tables, [tables, entries], each for the same number of output channels.
    """

    values: Tensor
    scale: Tensor | None = None
    tables: Tensor | None = None

    def has_form(self, form: Form) -> bool:
        """Return whether the constant is stored as a form requires: fp16, codes with scales, or indices into tables."""
        if form.kind == "palette":
            shape = (form.tables(len(self.values)), 2**form.bits)
            return self.tables is not None and tuple(self.tables.shape) == shape
        return self.tables is None and (self.scale is not None) == (form.kind == "int")

    @property
    def coded(self) -> bool:
        """Return whether the values are codes."""
        return self.scale is not None or self.tables is not None

    def whole(self) -> Tensor:
        """Return the whole constant in fp32."""
        if not self.coded:
            return self.values.float()
        found = torch.empty(self.values.shape)
        first = 0
        for rows in self.rows():
            found[first : first + len(rows)] = rows
            first += len(rows)
        return found

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """Yield rows [start, stop) in fp32, a block at a time; the product with the scale is not rounded again.

        Each block overwrites the one before it: allocating new memory for each would fragment the heap.
        """
        stop, count = len(self.values) if stop is None else stop, rows_at_once(math.prod(self.values.shape[1:]))
        scratch = torch.empty(self.values[:count].shape)
        for first in range(start, stop, count):
            kept = self.values[first : min(first + count, stop)]
            rows = scratch[: len(kept)]
            if self.tables is not None:
                rows.copy_(self._tables(first, len(kept)).gather(1, kept.long()))
            else:
                rows.copy_(kept)
            yield rows if self.scale is None else rows.mul_(self.scale[first : first + len(kept)])

    def steps(self, expected: Tensor, first: int) -> Tensor:
        """Return the quantisation step at each expected number; rounding to nearest is off by half a step at most.

        A palette's step is the gap between the two nearest entries; for a number beyond the table, the sum of the
        distances to both entries. No step is below fp16's smallest: a channel of only zeros has a scale of 0.

        Args:
            expected: the original rows of the constant, in fp32.
            first: the index, in the constant, of the first of these rows.
        """
        if self.scale is not None:
            return self.scale[first : first + len(expected)].clamp(min=FP16_STEP)
        if self.tables is None:
            return fp16_step(expected)
        return torch.stack([_gap(*pair) for pair in zip(expected, self._tables(first, len(expected)), strict=True)])

    def _tables(self, first: int, count: int) -> Tensor:
        """Return the table of each row, [count, entries], in fp32."""
        assert self.tables is not None
        share = len(self.values) // len(self.tables)
        return self.tables[torch.arange(first, first + count) // share].float()


def _gap(row: Tensor, table: Tensor) -> Tensor:
    """Return the sum of the distances of each number of a row to the two nearest of a table's entries."""
    entries = torch.unique_consecutive(table.sort().values)
    if len(entries) == 1:
        return torch.clamp((row - entries).abs() * 2, min=FP16_STEP)
    right = torch.searchsorted(entries, row).clamp(1, len(entries) - 1)
    return torch.clamp((row - entries[right - 1]).abs() + (entries[right] - row).abs(), min=FP16_STEP)


def fp16_step(values: Tensor) -> Tensor:
    """Return an upper bound of the distance between neighbouring fp16 numbers at each value."""
    return (values.abs() * 2**-10).clamp(min=FP16_STEP)
