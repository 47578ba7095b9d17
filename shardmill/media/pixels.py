"""A picture's views as columns of numbers, which a tower's program takes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmill.media.image_rules import ImageRules
from shardmill.media.layout import Layout, lay_out
from shardmill.media.pictures import Picture

Levels: TypeAlias = NDArray[np.uint8]
Columns: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class View:
    """One picture that the tower sees: a tile, or a whole picture.

    Attributes:
        grid: rows and columns of patches.
        levels: [3 patch^2, patches], one column for each patch, with its levels by colour, row and column. The
            patches whose features become one row of the model follow one another; such blocks are in reading order,
            and so are the patches of a block. A request that waits holds a byte for each, and not the four of a number.
        rules: which number a level is.
    """

    grid: tuple[int, int]
    levels: Levels
    rules: ImageRules

    @property
    def columns(self) -> Columns:
        """Return what the tower takes: the numbers of the levels."""
        each = self.levels.reshape(3, -1, self.levels.shape[1])
        return np.stack([table[levels] for table, levels in zip(_numbers(self.rules), each, strict=True)]).reshape(
            self.levels.shape
        )


def views(rules: ImageRules, picture: Picture) -> tuple[Layout, tuple[View, ...]]:
    """Return what becomes of a picture, and its views in the layout's order.

    Raises:
        MediaError: if the rules take no picture of this shape.
    """
    layout = lay_out(rules, *picture.size)
    (width, height), *more = layout.resized
    image = picture.resize(width, height, rules.filter)
    for size in more:
        image = Picture(image).resize(*size, rules.filter)
    shown = [image]
    if layout.tiles != (0, 0):
        side = image.height // layout.tiles[0]
        places = product(range(0, image.height, side), range(0, image.width, side))
        tiles = [image.crop((left, top, left + side, top + side)) for top, left in places]
        apart = layout.whole != (0, 0)
        whole = (
            picture.resize(*layout.whole, rules.filter) if apart else Picture(image).resize(side, side, rules.filter)
        )
        shown = [*tiles, whole]
    return layout, tuple(
        View(grid, columns(rules, np.asarray(one)[: grid[0] * rules.patch, : grid[1] * rules.patch]), rules)
        for grid, one in zip(layout.grids, shown, strict=True)
    )  # a tower's convolution leaves out the pixels beyond its last whole patch, too


def columns(rules: ImageRules, image: Levels) -> Levels:
    """Return an image's patches as columns of levels, see `View`.

    Args:
        rules: the size of patches.
        image: [height, width, 3], whole rows of the model in both directions.
    """
    height, width, colours = image.shape
    patch, merge = rules.patch, rules.merge
    blocks = image.reshape(height // rules.side, merge, patch, width // rules.side, merge, patch, colours)
    return blocks.transpose(6, 2, 5, 0, 3, 1, 4).reshape(colours * patch * patch, -1)


def _numbers(rules: ImageRules) -> Columns:
    """Return the number of each level of each colour, [3, 256], rounded where transformers rounds."""
    scaled = (np.arange(256, dtype=np.float64) * rules.scale).astype(np.float32)
    mean, std = (np.array(colour, np.float32)[:, None] for colour in (rules.mean, rules.std))
    return (scaled - mean) / std
