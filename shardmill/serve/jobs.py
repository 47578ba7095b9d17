"""Requests to the engine, each with its answer, and the queue in which they wait for their turns."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from drafted_decoding import GenerationResult, LabelScores, Options, PrefillEvent, TokenEvent

from shardmill.media.prompt import Seen
from shardmill.serve.protocol import ApiError


@dataclass(frozen=True)
class Work:
    """A request to the engine for an answer.

    Attributes:
        eos: the tokens that end the answer.
        adapter: the adapter that answers; None: the bare model.
        thinks: whether the prompt has opened a thought.
        pictures: the pictures whose rows the prompt has.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    drafter: str
    options: Options
    eos: tuple[int, ...]
    adapter: str | None = None
    thinks: bool = False
    pictures: tuple[Seen, ...] = ()


@dataclass(frozen=True)
class DecideWork:
    """A request to the engine for the probabilities of labels, given the tokens of the prompt and of each label."""

    prompt: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    logprobs: bool = True
    adapter: str | None = None


PAUSE = 0.02  # seconds between two pieces of a stream, which readers take for none

# An answer is events, then the result or an error. Of a prompt's passes only those are items that score its tokens.
Item = PrefillEvent | TokenEvent | GenerationResult | LabelScores | ApiError


class Job:
    """A request with its answer; created on the event loop that takes the answer.

    Attributes:
        client: who asks, as far as the queue can tell clients apart.
        submitted: `time.perf_counter` at creation.
        cancelled: why the job must end early; None if it need not.
    """

    def __init__(self, work: Work | DecideWork, client: str = "") -> None:
        self.work = work
        self.client = client
        self.submitted = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._whole = False  # whether only the end is waited for
        self._taken, self._pausing, self._held = -math.inf, False, False
        self.cancelled: ApiError | None = None

    def cancel(self, reason: ApiError) -> None:
        """Request an early end; the worker checks before every pass."""
        self.cancelled = self.cancelled or reason

    def put(self, item: Item) -> None:
        """Add an item to the answer; called by the worker thread. Never blocks."""
        with self._lock:
            self._items.append(item)
            due = self._due(item)
        if due:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self, *, whole: bool = False) -> list[Item]:
        """Return all items since the last call; wait until there are some.

        To wake the event loop takes longer than to send a token. So it is woken once for the tokens of a pass. While
        passes take less than `PAUSE`, it is woken once in this time and at the end.

        Args:
            whole: wait for the end.
        """
        self._whole = whole
        while True:
            await self._ready.wait()
            now = self._loop.time()
            with self._lock:
                items, self._items = self._items, []
                self._ready.clear()
                self._pausing = not whole and bool(items) and (self._held or now - self._taken < PAUSE)
            if items:
                self._taken, self._held = now, False
                if self._pausing:
                    self._loop.call_later(PAUSE, self._resume)
                return items

    def _resume(self) -> None:
        """End the pause, and hand over what came in it."""
        with self._lock:
            self._pausing, self._held = False, bool(self._items)
            due = self._held and self._due(self._items[-1])
        if due:
            self._ready.set()

    def _due(self, last: Item) -> bool:
        """Return whether the items up to `last` are handed over now; a pass ends with a token of the model's own."""
        if not isinstance(last, PrefillEvent | TokenEvent):
            return True
        return not (self._pausing or self._whole or (isinstance(last, TokenEvent) and last.from_draft))


def ending(items: list[Item]) -> GenerationResult | LabelScores | ApiError | None:
    """Return the last of `items` if it ends the answer, otherwise None."""
    last = items[-1]
    return None if isinstance(last, PrefillEvent | TokenEvent) else last


class FairQueue:
    """Waiting jobs: clients take turns, and in the turns of a client its jobs do."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by client, whose turn is next first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Job]:
        return chain.from_iterable(self._waiting.values())

    def add(self, job: Job) -> None:
        """Add a job as the last of its client's; a client without jobs gets the last turn."""
        self._waiting.setdefault(job.client, deque()).append(job)

    def take(self, first: Collection[Job] = ()) -> Job:
        """Remove and return the next client's next job, or its next job of those to come first, if it has one.

        The client gets the last turn.
        """
        client, jobs = self._waiting.popitem(last=False)
        job = next((job for job in jobs if job in first), jobs[0])
        jobs.remove(job)
        if jobs:
            self._waiting[client] = jobs
        return job

    def remove(self, job: Job) -> None:
        """Remove a job."""
        jobs = self._waiting[job.client]
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.client]
