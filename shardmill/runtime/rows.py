"""Rows of pictures and sounds that stand in a text in place of the embedding's, and where the text stands after them.

A row is a token beyond the vocabulary. Its number says what it is (media/numbers.py), so the same number is always the
same row, and whoever compares texts by their tokens compares the pictures in them. The engine is given rows before a
text that has them runs.

Some models turn a row by three positions: of time, height and width. A picture of h x w rows that begins at position p
has (p, p + r, p + c), and the text after it goes on at p + max(h, w), though the rows take h w slots. What later
positions are shifted by is kept by slot, so that it comes back with a copy of the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.errors import ShardmillError
from shardmill.runtime.kv import Floats

Grid = tuple[int, int]  # rows and columns


@dataclass(frozen=True, eq=False)
class Picture:
    """The rows [h * w, d] of a picture, or of a tile of one."""

    rows: Floats
    grid: Grid


class HeldRows:
    """The rows that an engine holds.

    Attributes:
        shifts: what is added to position p for a token of text there, [S + 1].
    """

    def __init__(self, vocab: int, slots: int) -> None:
        self._vocab = vocab
        self._pictures: dict[int, tuple[Picture, int]] = {}  # by number, with the index of the row
        self.shifts = np.zeros(slots + 1, np.int64)

    def hold(self, numbers: Sequence[int], rows: Floats, grid: Grid) -> None:
        """Take the rows of a picture.

        Args:
            numbers: of each row.
            rows: [h * w, d], in reading order.
            grid: h and w.

        Raises:
            ShardmillError: if these do not fit each other, or a number is one of the vocabulary.
        """
        if len(numbers) != len(rows) or len(rows) != grid[0] * grid[1] or min(numbers, default=0) < self._vocab:
            raise ShardmillError(f"{len(rows)} rows of {grid[0]} x {grid[1]} do not fit their {len(numbers)} numbers")
        picture = Picture(np.array(rows), grid)
        self._pictures |= {number: (picture, index) for index, number in enumerate(numbers)}

    def release(self, numbers: Sequence[int]) -> None:
        """Give up rows; texts that have them can't run any more, and what is kept of such texts stays."""
        for number in numbers:
            del self._pictures[number]

    def look_up(self, tokens: Sequence[int], table: Any) -> Floats:
        """Return the rows of tokens, [T, d].

        Args:
            tokens: of the vocabulary, or numbers of rows.
            table: the embedding's rows by token.

        Raises:
            ShardmillError: if a number's row was not given.
        """
        beyond = [place for place, token in enumerate(tokens) if token >= self._vocab]
        if not beyond:
            rows: Floats = table[list(tokens)]
            return rows
        rows = table[[0 if token >= self._vocab else token for token in tokens]]
        for place in beyond:
            picture, index = self._picture(tokens[place])
            rows[place] = picture.rows[index]
        return rows

    def turned(self, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.int64]:
        """Return by which positions tokens are turned, of time, height and width, [T, 3].

        The tokens before them must have been here, and those after a position that comes again are forgotten.
        """
        turned = np.empty((len(tokens), 3), np.int64)
        for place, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            after = shift = self.shifts[position]
            if token < self._vocab:
                turned[place] = position + shift
            else:
                picture, index = self._picture(token)
                height, width = picture.grid
                begin = position - index + shift
                turned[place] = begin, begin + index // width, begin + index % width
                if index == height * width - 1:
                    after = shift + max(height, width) - height * width
            self.shifts[position + 1] = after
        return turned

    def after(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return a copy of what shifts the positions after [start, stop); None if nothing does."""
        shifts = self.shifts[start + 1 : stop + 1]
        return shifts.copy() if shifts.any() else None

    def restore(self, start: int, stop: int, shifts: NDArray[np.int64] | None) -> None:
        """Put back what `after` returned."""
        self.shifts[start + 1 : stop + 1] = 0 if shifts is None else shifts

    def _picture(self, number: int) -> tuple[Picture, int]:
        if number not in self._pictures:
            raise ShardmillError(f"token {number} is beyond the vocabulary of {self._vocab}, and no row that is held")
        return self._pictures[number]
