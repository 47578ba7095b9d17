"""The tower of a built model: from an image's patches or a sound's frames to rows in the place of embedding rows.

The rules by which the host makes a program's inputs are in model.json, under `tower`:

    patch      pixels of a patch's side
    frames     how many times the pixels of a colour are taken, one after the other
    merge      patches a side of the block that becomes one row
    positions  the table of positions has `side` rows of as many columns. By the rule "bilinear" the corners of an image
               lie on the corners of the table, and a patch between four positions takes their mean by distance. By
               the rule "whole" the table has a position for each patch of an image. By the rule "antialiased" the
               edges of an image lie on the edges of the table, and a patch takes the mean of the positions around it,
               of more of them where an image has fewer patches than the table has positions.
    grid       the rows and columns of every image, if the tower takes one size alone
    rope       of each frequency, radians for each row or column, and which of the two (0 or 1)
    colours    "last" if the colours of a pixel stand side by side; otherwise colour follows colour
    scale      what rows are multiplied by, as the embedding table is
    axes       which axis of a row's position turns each frequency of the decoder: time, height or width (0 to 2)

Patches come in blocks of merge x merge, one block after the other, row by row, and in a block row by row.

A tower for sounds has these rules, beside `merge`, which is 1, and `scale`:

    chunk      frames that convolutions and positions see
    rows       that a whole chunk becomes; the last chunk of a sound may be shorter
    window     frames that layers see at once, which is a whole number of chunks
    waves      positions are sines, then cosines, of as many frequencies as half the `channels`: from 1 to 1 / `base`

A sound's grid is (1, frames), of a window at most, and its rows lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.errors import ShardmillError
from shardmill.models.interface import TOWER
from shardmill.models.tower import KEY_MASK, thrice_halved
from shardmill.runtime.kv import MASKED, Floats
from shardmill.runtime.pack import bucket_for
from shardmill.runtime.program import Program

Grid = tuple[int, int]  # rows and columns


def tokens_of(tower: Mapping[str, Any], grid: Grid) -> int:
    """Return how many tokens of a tower's program an image or a window of a sound fills."""
    if "chunk" not in tower:
        return grid[0] * grid[1]
    chunk, rows = int(tower["chunk"]), int(tower["rows"])
    return grid[1] // chunk * rows + thrice_halved(grid[1] % chunk)


def rows_of(tower: Mapping[str, Any], grid: Grid) -> Grid:
    """Return the grid of an image's or a window's rows, given that of its patches or frames."""
    if "chunk" in tower:
        return 1, tokens_of(tower, grid)
    return grid[0] // tower["merge"], grid[1] // tower["merge"]


def places(grid: Grid, merge: int) -> NDArray[np.int64]:
    """Return the row and the column of each patch of an image, in the order in which patches come: [h * w, 2]."""
    rows, columns = np.indices(grid).reshape(2, grid[0] // merge, merge, grid[1] // merge, merge)
    return np.stack([each.transpose(0, 2, 1, 3).ravel() for each in (rows, columns)], axis=1)


def _bilinear(at: NDArray[np.int64], extent: int, side: int) -> Floats:
    """Return the weights of a table's `side` places for places of an axis of some extent: [n, side]."""
    source = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(extent - 1, 1))
    floor = np.floor(source)
    weights = np.zeros((len(at), side), np.float32)
    for more in (0, 1):
        taken = np.maximum(1 - np.abs(source - floor - np.float32(more)), 0).astype(np.float32)
        weights[np.arange(len(at)), np.clip(floor.astype(np.int64) + more, 0, side - 1)] += taken
    return weights


def _whole(at: NDArray[np.int64], extent: int, side: int) -> Floats:
    """Return the weights of a table's `side` places, of which each patch has its own: [n, side]."""
    return np.eye(side, dtype=np.float32)[at]


def _antialiased(at: NDArray[np.int64], extent: int, side: int) -> Floats:
    """Return the weights of a table's `side` places by a triangle as wide as two patches, or two places: [n, side]."""
    patch = np.float32(side) / np.float32(extent)
    reach = max(patch, np.float32(1))
    middle = patch * (at.astype(np.float32) + np.float32(0.5))
    distance = np.abs(np.arange(side, dtype=np.float32) + np.float32(0.5) - middle[:, None]) / reach
    weights = np.maximum(1 - distance, 0)
    shares: Floats = weights / weights.sum(axis=1, keepdims=True)
    return shares


RULES: Mapping[str, Callable[[NDArray[np.int64], int, int], Floats]] = {
    "bilinear": _bilinear,
    "whole": _whole,
    "antialiased": _antialiased,
}


def laid(columns: Floats, tower: Mapping[str, Any]) -> Floats:
    """Return columns, see `tower_arrays`, in the program's order: [frames * colours * patch * patch, n]."""
    by_colour = columns.reshape(-1, tower["patch"] ** 2, columns.shape[1])  # [colours, patch^2, n]
    if tower.get("colours") == "last":
        by_colour = by_colour.transpose(1, 0, 2)
    repeated: Floats = np.repeat(by_colour[:, None], tower["frames"], axis=1).reshape(-1, columns.shape[1])
    return repeated


def tower_arrays(tower: Mapping[str, Any], bucket: int, columns: Floats, grid: Grid) -> dict[str, Floats]:
    """Return the inputs of a bucket's program by name.

    Args:
        tower: model.json's `tower`.
        bucket: patches of the program.
        columns: the numbers of the patches, [colours * patch * patch, h * w], of an image or a tile of an image; or of
            a sound's frames, [bins, frames].
        grid: how many patches the image has from top to bottom and from left to right; of a sound, 1 and its frames.
    """
    if "chunk" in tower:
        return _sound_arrays(tower, bucket, columns)
    at = places(grid, tower["merge"])
    count = len(at)
    arrays = {"x": _filled(laid(columns, tower), bucket)}
    if known := tower.get("positions"):
        side, rule = known["side"], RULES[known["rule"]]
        down, across = (rule(at[:, axis], grid[axis], side) for axis in (0, 1))
        arrays["positions"] = _filled((down[:, :, None] * across[:, None, :]).reshape(count, -1).T, bucket)
    if rope := tower.get("rope"):
        angles = at[:, rope["axes"]].astype(np.float32) * np.asarray(rope["inv_freq"], np.float32)
        angles = np.concatenate([angles, np.zeros((bucket - count, angles.shape[1]), np.float32)])
        arrays |= {"rope_cos": np.cos(angles), "rope_sin": np.sin(angles)}
    arrays[KEY_MASK] = np.where(np.arange(bucket) < count, np.float32(0), MASKED)[None, None, None]
    return arrays


def _sound_arrays(tower: Mapping[str, Any], bucket: int, frames: Floats) -> dict[str, Floats]:
    """Return the inputs of a bucket's program for a window's frames [bins, n]; the bucket is in rows."""
    chunk, rows = tower["chunk"], tower["rows"]
    filled = np.zeros((len(frames), bucket // rows * chunk), np.float32)
    filled[:, : frames.shape[1]] = frames
    count = tokens_of(tower, (1, frames.shape[1]))
    return {
        "x": np.ascontiguousarray(filled.reshape(len(frames), -1, 1, chunk).transpose(1, 2, 0, 3)),
        "positions": _waves(rows, **tower["waves"]),
        KEY_MASK: np.where(np.arange(bucket) < count, np.float32(0), MASKED)[None, None, None],
    }


def _waves(rows: int, channels: int, base: float) -> Floats:
    """Return what is added to the rows of a chunk, [1, channels, 1, rows]; in fp32 step by step, as PyTorch does."""
    half = channels // 2
    slower = np.float32(-np.log(base) / max(half - 1, 1)) * np.arange(half, dtype=np.float32)
    turned = np.arange(rows, dtype=np.float32) * np.exp(slower)[:, None]
    return np.concatenate([np.sin(turned), np.cos(turned)])[None, :, None]


def _filled(values: Floats, bucket: int) -> Floats:
    """Return columns [n, patches] as an input [1, n, T, 1], with zeros in the rest of the bucket."""
    filled = np.zeros((1, len(values), bucket, 1), np.float32)
    filled[0, :, : values.shape[1], 0] = values
    return filled


class Tower:
    """The programs of all buckets, loaded."""

    def __init__(self, manifest: Mapping[str, Any], root: Path) -> None:
        """Load the programs.

        Args:
            manifest: model.json's content, with a tower.
            root: the folder that the manifest's paths are relative to.
        """
        self.rules: Mapping[str, Any] = manifest[TOWER]
        self.programs: dict[int, Program] = {}  # by the tokens of the bucket
        for part in manifest["parts"]:
            if part["kind"] == TOWER:
                self.programs[part["inputs"][KEY_MASK][-1]] = Program(root / part["program"]["path"], part)

    @property
    def most(self) -> int:
        """Return the tokens of the largest bucket."""
        return max(self.programs)

    def rows(self, columns: Floats, grid: Grid, bucket: int | None = None) -> Floats:
        """Return the rows of an image, a tile or a window, in the scale of the embedding table: [rows, d].

        Args:
            columns: see `tower_arrays`.
            grid: see `tower_arrays`.
            bucket: whose program runs; by default the smallest one that is large enough.

        Raises:
            ShardmillError: if the grid does not divide into blocks, or no bucket is large enough.
        """
        count, merge = tokens_of(self.rules, grid), self.rules["merge"]
        if min(grid) < 1 or any(extent % merge for extent in grid) or grid[0] * grid[1] != columns.shape[1]:
            raise ShardmillError(f"{grid[0]} x {grid[1]} patches are no blocks of {merge} x {merge}")
        try:
            bucket = bucket or bucket_for(tuple(self.programs), count)
        except ValueError as error:
            what = "a window of" if "chunk" in self.rules else "an image of"
            what += f" {grid[1]} frames" if "chunk" in self.rules else f" {count} patches"
            raise ShardmillError(f"{what}: the largest program takes {self.most}") from error
        program = self.programs[bucket]
        hidden = program(tower_arrays(self.rules, bucket, columns, grid))  # [1, d, T / merge^2, 1]
        rows: Floats = hidden[0, :, : count // merge**2, 0].T * np.float32(self.rules["scale"])
        return rows
