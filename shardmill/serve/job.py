"""One request in progress: the worker thread adds to its answer, the event loop takes from it, and neither blocks.

The backlog of a slow reader is bounded by the request itself: at most max_new_tokens events and an ending. The reader
then gets it in fewer, larger pieces.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from shardmill.decode import GenerationResult, Options, TokenEvent
from shardmill.serve.errors import ApiError


@dataclass(frozen=True)
class Work:
    """A request to the engine."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    drafter: str
    options: Options


@dataclass(frozen=True)
class Done:
    """The end of a complete answer."""

    result: GenerationResult


Item = TokenEvent | Done | ApiError  # an answer is events, then one Done or ApiError


class Job:
    """A request with its answer; created on the event loop that takes the answer.

    Attributes:
        submitted: `time.perf_counter` at creation.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.submitted = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._cancelled: ApiError | None = None

    @property
    def cancelled(self) -> ApiError | None:
        """Return why the job must end early; None if it need not."""
        return self._cancelled

    def cancel(self, reason: ApiError) -> None:
        """Request an early end; the worker checks before every pass."""
        self._cancelled = self._cancelled or reason

    def put(self, item: Item) -> None:
        """Add an item to the answer; called by the worker thread. Never blocks."""
        with self._lock:
            self._items.append(item)
            first = len(self._items) == 1
        if first:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> list[Item]:
        """Return all items since the last call; wait until there is one."""
        while True:
            await self._ready.wait()
            with self._lock:
                items, self._items = self._items, []
                self._ready.clear()
            if items:
                return items


def ending(items: list[Item]) -> Done | ApiError | None:
    """Return the last of `items` if it ends the answer, otherwise None."""
    last = items[-1]
    return None if isinstance(last, TokenEvent) else last
