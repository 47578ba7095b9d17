"""What a layer keeps from pass to pass, by the first letter of its name: "k_3" is layer 3's cache of keys."""

from __future__ import annotations

from enum import Enum

Shape = tuple[int, ...]
T = -1  # stands for the token axis in shapes
RING = 32  # slots of a convolution's ring: the narrowest state that the Neural Engine takes (rule S8)


class CacheKind(Enum):
    """How a pass changes a cache, and along which axis it lies."""

    KV = "a row for each slot"  # [1, kv_heads, S, head_dim]
    RING = "a column for each of the last positions"  # [1, 1, channels, R]
    STATE = "a recurrence's state, new as a whole"  # [1, heads, ., .]


KINDS = {"k": CacheKind.KV, "v": CacheKind.KV, "c": CacheKind.RING, "s": CacheKind.STATE}


def cache_kind(name: str) -> CacheKind | None:
    """Return the kind of a cache by its name; None for any other name."""
    letter, line, _ = name.partition("_")
    return KINDS.get(letter) if line else None


def new_shape(name: str, shape: Shape) -> Shape:
    """Return the shape of what a pass adds to a cache of this name and shape."""
    kind = cache_kind(name)
    if kind is CacheKind.STATE:
        return shape
    return (*shape[:3], T) if kind is CacheKind.RING else (*shape[:2], T, shape[3])
