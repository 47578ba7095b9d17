"""The work of a server of an encoder: one text at a time, in the order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardmill.serve.errors import shutting_down, too_busy
from shardmill.serve.metrics import Metrics

T = TypeVar("T")


class Desk:
    """A thread that the engine belongs to, and a queue before it."""

    def __init__(self, metrics: Metrics, queue: int) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._metrics, self._most, self._waiting, self._open = metrics, queue + 1, 0, True

    @property
    def is_well(self) -> bool:
        """Whether it takes requests."""
        return self._open

    async def take(self, work: Callable[[], T]) -> T:
        """The result of some work, once it is its turn.

        Raises:
            ApiError: the queue is full, or the server ends.
        """
        if not self._open:
            raise shutting_down()
        if self._waiting >= self._most:
            raise too_busy(f"{self._most - 1} requests wait already; try again later", 1)
        self._waiting += 1
        self._metrics.queued.set(max(self._waiting - 1, 0))
        try:
            with self._metrics.request_seconds.time():
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1
            self._metrics.queued.set(max(self._waiting - 1, 0))

    def start(self) -> None:
        """Nothing: the thread starts with its first work."""

    def refuse(self) -> None:
        """Takes no more requests."""
        self._open = False

    def cancel_running(self) -> None:
        """Nothing: a text takes no longer than a grace period."""

    def close(self, timeout: float) -> None:
        """Ends the thread after what it does now."""
        self._open = False
        self._pool.shutdown(wait=True, cancel_futures=True)
