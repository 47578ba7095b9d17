"""Tables for palettes: k-means of fp16 numbers, to the bit the same on every machine.

Lloyd's algorithm runs on the histogram of a matrix. An fp16 number is a whole multiple of 2^-24, so the sums in a mean
are sums of integers, which are exact in any order. The only rounding is one division for each entry, which IEEE 754
rounds alike everywhere. coremltools' own k-means is exact in its result, but its sums are floating-point: a compiler
chooses their order and fused operations. For fewer than 10,000 numbers, it needs scikit-learn.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmill.convert.weights import FP16_MAX

INT8_LEVELS = 127


def to_fp16(rows: Tensor) -> tuple[Tensor, float]:
    """Return rows of any float dtype in fp16, and their largest magnitude before rounding (NaN if there is a NaN)."""
    wide = rows.float()
    return wide.half(), float(torch.maximum(wide.amax().abs(), wide.amin().abs()))


def to_integers(rows: Tensor, levels: int = INT8_LEVELS) -> tuple[Tensor, Tensor, float]:
    """Return rows [n, columns] of any float dtype as int8 [n, columns], scales [n] in fp16, and the largest magnitude.

    `levels` is the largest magnitude of an integer.
    """
    wide = rows.float()
    largest = torch.maximum(
        wide.amax(dim=1).abs(), wide.amin(dim=1).abs()
    )  # [n]; in fp16, also the largest rounded magnitude
    limit = largest.half()
    scale = (limit + limit) / (2 * levels)
    codes = wide.half().div_(scale[:, None]).round_().clamp_(-levels, levels)
    if not scale.all():  # 0 / 0, in a row of zeros or of numbers too small for a scale; NaN has no integer
        codes.nan_to_num_(nan=0.0)
    return codes.float().to(torch.int8), scale, float(largest.max())


def fits_fp16(magnitude: float) -> bool:
    """Return whether fp16 holds a magnitude; false for NaN."""
    return magnitude <= FP16_MAX


Histogram = NDArray[np.int64]  # [65536]: how often each fp16 number occurs, by its bits
PATTERNS = 1 << 16
UNIT = 2.0**24  # units in one
MOST_ROUNDS = 500
_EVERY = np.arange(PATTERNS, dtype=np.uint16).view(np.float16)
_FINITE = np.isfinite(_EVERY)
# Each fp16 number in units of 2^-24, by its bits.
_UNITS = (np.where(_FINITE, _EVERY, 0).astype(np.float64) * UNIT).astype(np.int64)


def histogram(values: NDArray[np.float16]) -> Histogram:
    """Return how often each fp16 number occurs."""
    return np.bincount(values.view(np.uint16).ravel(), minlength=PATTERNS)


def palette_table(counts: Histogram, entries: int) -> NDArray[np.float16]:
    """Return the entries [entries] of a palette, ascending, for the finite numbers that a histogram counts.

    If the numbers have at most `entries` different values, the palette holds all values and repeats the largest one.
    """
    units, weights = _sorted(counts)
    if len(units) <= entries:
        centres = np.append(units, np.repeat(units[-1:], entries - len(units))).astype(np.float64)
    else:
        centres = _means(units, weights, entries)
    return np.sort((centres / UNIT).astype(np.float16))


def indices(entries: NDArray[np.float16], values: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Return the index of the entry nearest to each finite number; of two equally near entries, the smaller one."""
    if values.size < PATTERNS:
        return _nearest(entries, values)
    return _nearest(entries, np.where(_FINITE, _EVERY, np.float16(0)))[values.view(np.uint16)]


def _nearest(entries: NDArray[np.float16], values: NDArray[np.float16]) -> NDArray[np.uint8]:
    wide = entries.astype(np.float64)
    return np.searchsorted((wide[1:] + wide[:-1]) * 0.5, values.astype(np.float64), side="left").astype(np.uint8)


def _sorted(counts: Histogram) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers that occur, in units and ascending, and how often each number occurs."""
    present = np.flatnonzero(counts)
    units, places = np.unique(_UNITS[present], return_inverse=True)  # 0 and -0 are one
    weights = np.zeros(len(units), np.int64)
    np.add.at(weights, places, counts[present])
    return units, weights


def _means(units: NDArray[np.int64], weights: NDArray[np.int64], entries: int) -> NDArray[np.float64]:
    """Return the centres of k-means for ascending numbers; there are more numbers than entries."""
    before = np.concatenate(([0], np.cumsum(weights)))
    sums = np.concatenate(([0], np.cumsum(units * weights)))
    bounds = _start(units, weights, entries)
    for _ in range(MOST_ROUNDS):
        count, total = np.diff(before[bounds]), np.diff(sums[bounds])
        centres = total / np.maximum(count, 1)
        empty = count == 0
        centres[empty] = units[np.minimum(bounds[:-1], len(units) - 1)][empty]
        middle = np.searchsorted(units, (centres[1:] + centres[:-1]) * 0.5, side="right")
        moved = np.concatenate(([0], middle, [len(units)]))
        if np.array_equal(moved, bounds):
            break
        bounds = moved
    return centres


def _start(units: NDArray[np.int64], weights: NDArray[np.int64], entries: int) -> NDArray[np.int64]:
    """Return the first cluster bounds [entries + 1]: repeatedly split the cluster whose split lowers the error most.

    The sums here are floating-point, but in a fixed order and without fused operations: alike on every machine, too.
    """
    x, w = units / UNIT, weights.astype(np.float64)
    sums = [np.concatenate(([0.0], np.cumsum(part))) for part in (w, w * x, w * x * x)]

    def error(first: Any, last: Any) -> Any:
        """Return the sum of the squared distances of the numbers [first, last) from their mean."""
        n, linear, square = (s[last] - s[first] for s in sums)
        return square - linear * linear / n

    def split(first: int, last: int) -> tuple[float, int, int, int]:
        """Return the change of the error if a cluster is split, inf if it can't be split.

        Also return the bounds of the cluster, and where to split it.
        """
        if last - first == 1:
            return math.inf, first, last, last
        inner = np.arange(first + 1, last)
        left = error(first, inner) + error(inner, last)
        best = int(left.argmin())
        return float(left[best] - error(first, last)), first, last, int(inner[best])

    clusters = [split(0, len(units))]
    while len(clusters) < entries:
        _, first, last, middle = heapq.heappop(clusters)
        heapq.heappush(clusters, split(first, middle))
        heapq.heappush(clusters, split(middle, last))
    return np.array([*sorted(first for _, first, _, _ in clusters), len(units)])
