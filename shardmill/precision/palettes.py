"""Palettes for a matrix whose inputs are known: tables by k-means in which each number weighs what its input does.

An error of a number counts by the square of what it is multiplied with, which is the diagonal of H. The tables are the
best there are for these weights: k-means in one dimension has an exact solution, and coremltools ships a library that
finds it (kmeans1d). It runs on one thread, and the sums before it are made in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmill.convert.palette import PATTERNS, indices
from shardmill.forms.form import Form

DAMPING = 0.01  # of the mean of the weights, added to each: numbers whose inputs calibration has not seen count too


@dataclass(frozen=True)
class Palettes:
    """A matrix as indices and tables: `codes` [rows, columns] in uint8, `lut` [tables, entries] in fp16."""

    codes: Tensor
    lut: Tensor

    @property
    def values(self) -> Tensor:
        """What they stand for, in fp32 [rows, columns]."""
        groups = self.codes.reshape(len(self.lut), -1).long()
        return self.lut.float().gather(1, groups).reshape(self.codes.shape)


def palettised(weight: Tensor, form: Form, importance: Tensor | None) -> Palettes:
    """Every number to the nearest entry of its table.

    Args:
        weight: [rows, columns] in fp32.
        form: of a palette that fits the matrix.
        importance: [columns], what an error of each column weighs; all the same if None.
    """
    half = weight.half().numpy()
    weigh = _damped(importance) if importance is not None else np.ones(half.shape[1])
    groups = half.reshape(form.tables(len(half)), -1, half.shape[1])
    tables = [_table(group, weigh, 2**form.bits) for group in groups]
    codes = [indices(table, group.ravel()) for table, group in zip(tables, groups, strict=True)]
    return Palettes(torch.from_numpy(np.concatenate(codes).reshape(half.shape)), torch.from_numpy(np.stack(tables)))


def _damped(importance: Tensor) -> NDArray[np.float64]:
    """Weights of columns, none of them zero."""
    weigh = importance.double().numpy()
    return weigh + (DAMPING * weigh.mean() or 1.0)


def _table(group: NDArray[np.float16], weigh: NDArray[np.float64], entries: int) -> NDArray[np.float16]:
    """The entries of a table, ascending, for rows [n, columns]; the last of them once more where there are too many."""
    from coremltools._deps import kmeans1d

    columns = np.broadcast_to(weigh, group.shape).ravel()
    sums = np.bincount(group.view(np.uint16).ravel(), columns, PATTERNS)
    present = np.flatnonzero(sums)
    numbers, places = np.unique(present.astype(np.uint16).view(np.float16), return_inverse=True)  # 0 and -0 are one
    weights = np.bincount(places, sums[present])
    if len(numbers) <= entries:
        return np.append(numbers, np.repeat(numbers[-1:], entries - len(numbers)))
    found = kmeans1d.cluster(numbers.astype(np.float64), entries, weights=weights)
    return np.sort(np.array(found.centroids).astype(np.float16))
