"""Shares the work of a program among threads, in pieces that do not depend on how many threads there are.

BLAS cuts a product differently for each number of threads, and adds up the rows at a cut in another order. So a
program runs on one thread, and only products are shared: each piece is computed by one thread, and which thread that
is does not matter. A result has the same bits whatever the number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

import torch

_here = threading.local()  # `threads`: how many this thread may use while torch is told to use one


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on the calling thread alone; `in_pieces` still uses as many threads as torch had."""
    threads = torch.get_num_threads()
    if threads == 1:  # also within another call
        yield
        return
    _here.threads = threads
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        del _here.threads


@contextmanager
def all_threads() -> Iterator[None]:
    """Give torch its threads back for work whose result does not depend on how torch shares it, as sums in integers."""
    threads = getattr(_here, "threads", 1)
    if threads == 1:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def in_pieces(work: Callable[[int, int], object], size: int, piece: int) -> None:
    """Call work(first, last) for each piece of range(size), on one thread each.

    Args:
        work: writes the results of its piece; calls must not depend on each other.
        size: the number of items.
        piece: the number of items of a piece. It must follow from the sizes of the work alone.
    """
    with one_thread():
        starts = iter(range(0, size, piece))

        def take() -> None:
            for first in starts:  # each start is taken once, whoever asks
                work(first, min(first + piece, size))

        helpers = min(getattr(_here, "threads", 1), -(-size // piece)) - 1
        pool = _pool(getattr(_here, "threads", 1) - 1, os.getpid()) if helpers > 0 else None
        others = [] if pool is None else [pool.submit(torch.inference_mode()(take)) for _ in range(helpers)]
        try:
            take()
        finally:
            for other in others:
                if not other.cancel():  # a helper that has not begun is not waited for
                    other.result()


@lru_cache(1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return a pool whose threads have begun, each with one thread of torch; a forked process needs its own."""
    pool = ThreadPoolExecutor(threads, "pieces", initializer=torch.set_num_threads, initargs=(1,))
    begun = threading.Barrier(threads + 1)  # `set_num_threads` also counts for threads that begin later
    for _ in range(threads):
        pool.submit(begun.wait)
    begun.wait()
    return pool
