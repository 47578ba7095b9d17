"""The host's arrays for a pass of an encoder, and which texts share a pass.

An encoder has no slots. Its program is built for a bucket of T tokens; texts fill the first tokens, one after the
other. No token sees a token of another text, or of the rest. So neither the bucket nor its other texts change the
output for a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.models.architecture import MASK, SLIDING_MASK
from shardmill.models.contract import rope_inputs
from shardmill.runtime.kv import MASKED, Floats, rope_tables

NOBODY = -1  # the text of a column that no text fills


def bucket_for(buckets: Sequence[int], count: int) -> int:
    """Return the smallest bucket that takes `count` tokens. Raises ValueError if the largest takes fewer."""
    fitting = [bucket for bucket in buckets if bucket >= count]
    if not fitting:
        raise ValueError(f"{count} tokens: the largest program takes {max(buckets)}")
    return min(fitting)


def packed_texts(counts: Sequence[int], longest: int) -> list[list[int]]:
    """Return which texts share a pass, by their indices.

    Each text goes into the first pass that has room, the longest text first.

    Every pass reads all weights, so few passes count for more than full passes.

    Args:
        counts: tokens of each text.
        longest: the most tokens of a pass.
    """
    passes: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(counts)), key=lambda i: (-counts[i], i)):
        at = next((at for at, left in enumerate(room) if left >= counts[index]), len(passes))
        if at == len(passes):
            passes.append([])
            room.append(longest)
        passes[at].append(index)
        room[at] -= counts[index]
    return passes


def encoder_arrays(runtime: Mapping[str, Any], bucket: int, counts: Sequence[int]) -> dict[str, Floats]:
    """Return the arrays of a pass by the names of inputs, all but x.

    Args:
        runtime: settings of the model from model.json: rope, band, causal.
        bucket: T.
        counts: the tokens of each text, one text after the other.
    """
    at = np.array(list(chain.from_iterable(map(range, counts))), np.int64)
    at = np.concatenate([at, np.arange(bucket - len(at))])
    arrays = {
        name: rows[at]
        for table, numbers in runtime["rope"].items()
        for name, rows in zip(rope_inputs(table), rope_tables(numbers, bucket), strict=True)
    }
    causal = bool(runtime.get("causal"))
    arrays[MASK] = encoder_mask(bucket, counts, causal=causal)
    if runtime["band"] is not None:
        arrays[SLIDING_MASK] = encoder_mask(bucket, counts, runtime["band"], causal=causal)
    return arrays


def encoder_mask(bucket: int, counts: Sequence[int], band: int | None = None, *, causal: bool = False) -> Floats:
    """Return [1, 1, T, T]: 0 where row and column are of one text and at most `band` apart, otherwise -1e4.

    If `causal`, no row sees a later column.
    """
    texts = owners(bucket, counts)
    visible = texts[None, :] == texts[:, None]
    if band is not None:
        at = np.arange(bucket)
        visible &= np.abs(at[None, :] - at[:, None]) <= band
    if causal:
        visible &= np.tri(bucket, dtype=bool)
    return np.where(visible, np.float32(0), MASKED)[None, None]


def owners(bucket: int, counts: Sequence[int]) -> NDArray[np.int64]:
    """Return the index of the text in each column of a pass, [T]."""
    indices = np.full(bucket, NOBODY)
    indices[: sum(counts)] = np.repeat(np.arange(len(counts)), counts)
    return indices


def columns(texts: Sequence[Floats], bucket: int) -> Floats:
    """Return x [1, d, T, 1] of the rows [n, d] of each text, one text after the other, and zeros."""
    rows = np.concatenate(texts)
    x = np.zeros((1, rows.shape[1], bucket, 1), np.float32)
    x[0, :, : len(rows), 0] = rows.T
    return x


def apart(rows: Floats, counts: Sequence[int]) -> list[Floats]:
    """Return the rows of each text, given the rows of a pass [T, n]."""
    return np.split(rows[: sum(counts)], np.cumsum(counts)[:-1])
