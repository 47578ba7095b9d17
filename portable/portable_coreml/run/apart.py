"""Work in small pieces, a thread for each: torch's own threads gain nothing on products as small as an expert's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def each(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """The results for all items in order, on as many threads as torch has: the same whatever their number."""
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < threads:
        return map(work, items)

    def alone(item: T) -> R:
        with torch.inference_mode():  # which each thread has to itself
            return work(item)

    return _pool(threads).map(alone, items)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads in each of which torch has one."""
    ready = threading.Barrier(threads)

    def begin() -> None:
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="expert")
    for started in [pool.submit(begin) for _ in range(threads)]:
        started.result()
    torch.set_num_threads(threads)  # some of torch's libraries have one number for all threads
    return pool
