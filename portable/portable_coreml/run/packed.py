"""Keeps copies of stored matrices in the layout of a fast kernel, in place of the memory that they are mapped into."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np


class Packed:
    """The packed copy of one matrix, which all functions that multiply with the matrix share.

    Attributes:
        pieces: the kernel's copies, each of some rows; empty until they are earned, or if they can't be made.
    """

    def __init__(self, source: np.ndarray | None = None) -> None:
        """`source`: the array that holds the matrix, if it may be mapped from a file."""
        self.pieces: tuple[Any, ...] = ()
        self._mapped = [] if source is None else _mapped(source)
        self._products = 0
        self._tried = False
        self._lock = threading.Lock()

    @property
    def is_mapped(self) -> bool:
        """Return whether a copy takes the place of mapped pages; another matrix stays in memory beside its copy."""
        return bool(self._mapped)

    def earned(self, after: int, pack: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Count a product with the matrix and return its copies.

        Args:
            after: products without a copy; the next one makes it.
            pack: makes the copies; may return none, and is then not called again.
        """
        if not self._tried:
            with self._lock:
                self._products += 1
                if self._products > after and not self._tried:
                    self.pieces = pack()
                    self._tried = True
                    self.give_back()
        return self.pieces

    def join(self, other: Packed) -> Packed:
        """Serve another function's matrix, too: the same numbers, mapped once more."""
        if other is not self:
            self._mapped += other._mapped
        return self

    def give_back(self) -> None:
        """Free the memory in which the mapped matrix lies, if there is a copy; the next use reads the file again."""
        for mapped, first, size in self._mapped if self.pieces else ():
            file = mapped()
            if file is not None:  # the function that mapped it may be gone
                file.madvise(mmap.MADV_DONTNEED, first, size)


def _mapped(array: np.ndarray) -> list[tuple[ref[mmap.mmap], int, int]]:
    """Return the file that an array is mapped from, and the first byte and size of the array's whole pages in it."""
    file: Any = array
    while isinstance(file, np.ndarray):
        file = file.base
    if not isinstance(file, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return []
    start = array.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (start + array.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    return [(ref(file), first, size)] if size > 0 else []
