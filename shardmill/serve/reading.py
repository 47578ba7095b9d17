"""The engine thread of an encoder's server: up to 64 texts a turn, in the order of arrival."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardmill.errors import EngineGoneError
from shardmill.serve.errors import broken, client_gone, shutting_down, too_busy
from shardmill.serve.metrics import Metrics

T = TypeVar("T")


class Desk:
    """An encoder's worker: the thread that owns the engine, and the queue before it.

    Attributes:
        stop: ends the server; called if the engine can't be used any more.
        error: why the engine can't be used.
    """

    def __init__(self, metrics: Metrics, queue: int) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._metrics, self._most, self._waiting, self._open = metrics, queue + 1, 0, True
        self._ended, self._over = threading.Event(), threading.Event()
        self.stop: Callable[[], None] = lambda: None
        self.error: Exception | None = None

    @property
    def is_well(self) -> bool:
        """Return whether requests are accepted."""
        return self._open

    async def take(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine thread in arrival order and return its result.

        If nobody waits for the result any more, the work stops after the current pass.

        Raises:
            ApiError: the queue is full, or the server ends.
        """
        if not self._open:
            raise shutting_down()
        if self._waiting >= self._most:
            raise too_busy(f"{self._most - 1} requests wait already; try again later", 1)
        over = threading.Event()

        def turn() -> T:
            self._over = over
            return work()

        self._waiting += 1
        self._metrics.queued.set(max(self._waiting - 1, 0))
        try:
            with self._metrics.request_seconds.time():
                return await asyncio.get_running_loop().run_in_executor(self._pool, turn)
        except EngineGoneError as error:
            self.error = error
            self.refuse()
            self.stop()
            raise broken() from error
        finally:
            over.set()
            self._waiting -= 1
            self._metrics.queued.set(max(self._waiting - 1, 0))

    def start(self) -> None:
        """Do nothing: the thread starts with the first work."""

    def refuse(self) -> None:
        """Accept no more requests."""
        self._open = False

    def check(self) -> None:
        """Raise ApiError if the work must stop; called between passes, since a text may take hundreds."""
        if self._ended.is_set():
            raise shutting_down()
        if self._over.is_set():
            raise client_gone()

    def cancel_running(self) -> None:
        """Stop the running text after its pass."""
        self._ended.set()

    def close(self, timeout: float) -> None:
        """End the thread after its current pass; a pass takes less time than any timeout."""
        self.refuse()
        self.cancel_running()
        self._pool.shutdown(wait=True, cancel_futures=True)
