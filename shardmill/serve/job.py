"""One request on its way: the worker thread puts its answer in, the event loop takes it out, and neither waits.

What a slow reader has not taken yet is bounded by the request itself: at most max_new_tokens events and an ending. The
reader then gets it in fewer, larger pieces.
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
    """What the engine is asked for."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    drafter: str
    options: Options


@dataclass(frozen=True)
class Done:
    """The end of a complete answer."""

    result: GenerationResult


Item = TokenEvent | Done | ApiError  # an answer is events, then one of the other two


class Job:
    """A request with its answer; created on the event loop that takes the answer.

    Attributes:
        submitted: `time.perf_counter` at its making.
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
        """Why the job has to end early; None if it does not."""
        return self._cancelled

    def cancel(self, reason: ApiError) -> None:
        """Asks for an early end; the worker looks before every pass."""
        self._cancelled = self._cancelled or reason

    def put(self, item: Item) -> None:
        """Adds to the answer; called by the worker thread. Never waits."""
        with self._lock:
            self._items.append(item)
            first = len(self._items) == 1
        if first:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> list[Item]:
        """Returns everything that came since the last time; waits until there is something."""
        while True:
            await self._ready.wait()
            with self._lock:
                items, self._items = self._items, []
                self._ready.clear()
            if items:
                return items


def ending(items: list[Item]) -> Done | ApiError | None:
    """The last of `items` if it ends the answer, else None."""
    last = items[-1]
    return None if isinstance(last, TokenEvent) else last
