"""The heap of glibc, which keeps what is freed between blocks in use; by the size of weights that is a lot."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Returns freed memory to the system."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim. Looked up once: every CDLL makes a class, which only the collector frees."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
