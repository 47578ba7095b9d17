"""Control of glibc's heap, which keeps freed memory between blocks in use: for model weights, gigabytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Return freed memory to the system."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim. Cached, because every CDLL creates a class that only the garbage collector frees."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
