"""The host's side of an encoder: which program takes a text, and the arrays of its pass.

A program is built for a bucket, T tokens of which a text fills the first n. No token sees one of the rest, so neither
the bucket nor what fills it up changes what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardmill.models.architecture import MASK, SLIDING_MASK
from shardmill.models.contract import rope_inputs
from shardmill.models.host import MASKED, Floats, rope_tables


def bucket_for(buckets: Sequence[int], count: int) -> int:
    """The smallest bucket that takes so many tokens. Raises ValueError for more than the largest takes."""
    fitting = [bucket for bucket in buckets if bucket >= count]
    if not fitting:
        raise ValueError(f"{count} tokens: the largest program takes {max(buckets)}")
    return min(fitting)


def arrays(runtime: Mapping[str, Any], bucket: int, count: int) -> dict[str, Floats]:
    """The arrays of a pass by the names of inputs, all but x.

    Args:
        runtime: what model.json says of the model: rope, band.
        bucket: T.
        count: the tokens that there are, which come first.
    """
    found = {
        name: rows
        for table, numbers in runtime["rope"].items()
        for name, rows in zip(rope_inputs(table), rope_tables(numbers, bucket), strict=True)
    }
    found[MASK] = attention_mask(bucket, count)
    if runtime["band"] is not None:
        found[SLIDING_MASK] = attention_mask(bucket, count, runtime["band"])
    return found


def attention_mask(bucket: int, count: int, band: int | None = None) -> Floats:
    """[1, 1, T, T]: 0 where the column is one of `count` tokens, at most `band` away from the row's, else -1e4."""
    at = np.arange(bucket)
    visible = np.broadcast_to(at[None, :] < count, (bucket, bucket))
    if band is not None:
        visible = visible & (np.abs(at[None, :] - at[:, None]) <= band)
    return np.where(visible, np.float32(0), MASKED)[None, None]


def columns(rows: Floats, bucket: int) -> Floats:
    """x [1, d, T, 1] of the rows [n, d] of a text, and zeros."""
    x = np.zeros((1, rows.shape[1], bucket, 1), np.float32)
    x[0, :, : len(rows), 0] = rows.T
    return x
