"""One thread owns the engine: requests wait in a queue, and each answer is taken from its job token by token."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from drafted_decoding import (
    ContextPolicy,
    DecodeError,
    Drafter,
    DraftPolicy,
    GenerationResult,
    LabelScores,
    LearnedDrafter,
    NotFiniteError,
    Options,
    PrefillEvent,
    PrefixCache,
    Session,
    TokenEvent,
    create_drafter,
    create_policy,
    generate,
    measure_widths,
    score_labels,
)
from drafted_decoding.drafters.follow import Numbering

from shardmill.errors import AdapterError
from shardmill.printable import one_line
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model
from shardmill.serve.opening import keep_opening
from shardmill.serve.protocol import ApiError, broken, invalid, shutting_down, too_busy


@dataclass(frozen=True)
class Work:
    """A request to the engine for an answer.

    Attributes:
        eos: the tokens that end the answer.
        adapter: the adapter that answers; None: the bare model.
        thinks: whether the prompt has opened a thought.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    drafter: str
    options: Options
    eos: tuple[int, ...]
    adapter: str | None = None
    thinks: bool = False


@dataclass(frozen=True)
class DecideWork:
    """A request to the engine for the probabilities of labels, given the tokens of the prompt and of each label."""

    prompt: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    logprobs: bool = True
    adapter: str | None = None


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
        self.cancelled: ApiError | None = None

    def cancel(self, reason: ApiError) -> None:
        """Request an early end; the worker checks before every pass."""
        self.cancelled = self.cancelled or reason

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


def ending(items: list[Item]) -> GenerationResult | LabelScores | ApiError | None:
    """Return the last of `items` if it ends the answer, otherwise None."""
    last = items[-1]
    return None if isinstance(last, PrefillEvent | TokenEvent) else last


log = logging.getLogger(__name__)
LONGEST_RETRY = 60  # seconds; openai's client ignores a longer Retry-After


class _CancelledError(Exception):
    """The running job was cancelled."""


class FairQueue:
    """Waiting jobs: clients take turns, and the jobs of one client run in their order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by client, whose turn is next first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Job]:
        return chain.from_iterable(self._waiting.values())

    def add(self, job: Job) -> None:
        """Add a job as the last of its client's; a client without jobs gets the last turn."""
        self._waiting.setdefault(job.client, deque()).append(job)

    def take(self) -> Job:
        """Remove and return the next job; its client gets the last turn."""
        client, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[client] = jobs
        return job

    def remove(self, job: Job) -> None:
        """Remove a job."""
        jobs = self._waiting[job.client]
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.client]


class Worker:
    """The engine thread and its queue.

    Args:
        model: the model to run; its engine is used only by the worker.
        metrics: the server's counters.
        queue: jobs that may wait while one runs.
        policy: the draft policy, by name.
        draft_table: file that `learned` starts with, if it exists; `close` writes it.
        context_policy: what happens when the context is full.
        prefix_cache: bytes for prefixes of earlier texts.
        opening: tokens with which many prompts will begin, kept before the first request and after a failed one; a
            later process reads them from a file.

    Attributes:
        stop: ends the server; called if the engine can't be used any more.
        error: why the engine can't be used.

    Raises:
        DecodeError: the context is too small to slide or for the opening, the draft model has another vocabulary, or no
            policy has that name. Also if the table is damaged or another model's, because it would be overwritten at
            the end.
    """

    def __init__(
        self,
        model: Model,
        metrics: Metrics,
        *,
        queue: int,
        policy: str = "cost_model",
        draft_table: Path | None = None,
        context_policy: ContextPolicy = "stop",
        prefix_cache: int = 0,
        opening: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._limit = queue
        self._waiting = FairQueue()
        self._running: Job | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._seconds = 1.0  # of a request; a running average
        self._costs = measure_widths(model.engine)  # it also runs the first, slow calls of each width
        self._context_policy = context_policy
        self._prefixes: PrefixCache | None = None
        if prefix_cache and any(model.engine.copy_bytes()):
            self._prefixes = PrefixCache(model.engine, prefix_cache)
            metrics.watch(self._prefixes)
        self._opening = opening
        self._session = self._new_session()
        self._keep_opening()
        self._policy, self._draft_table = policy, draft_table
        self._numbering = Numbering(model.engine.vocab, model.tokenizer_digest)
        self._learned = LearnedDrafter()
        if draft_table is not None and draft_table.exists():
            self._learned.load(draft_table, self._numbering)
        self.stop: Callable[[], None] = lambda: None
        self.error: Exception | None = None
        self._helpers: dict[str, tuple[Drafter, DraftPolicy]] = {}
        self._helpers_for("learned")
        if model.draft_session is not None:
            self._helpers_for("draft_model")  # report an unfit draft model before the first request
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    @property
    def is_well(self) -> bool:
        """Return whether a new request would be answered."""
        return self._thread.is_alive() and not self._closing

    def submit(self, job: Job, *, follows: bool = False) -> None:
        """Queue a job.

        Args:
            job: the job.
            follows: True for a further job of a request whose last job is over; it finds a place in a full queue too.

        Raises:
            ApiError: 429 if the queue is full, 503 if the server is shutting down.
        """
        with self._changed:
            self._check_room(follows)
            self._waiting.add(job)
            self._metrics.queued.set(len(self._waiting))
            self._changed.notify()

    def check_room(self) -> None:
        """Raise what `submit` would raise now, for a request whose preparation takes long."""
        with self._changed:
            self._check_room(follows=False)

    def _check_room(self, follows: bool) -> None:
        if self._closing:
            raise shutting_down()
        if not follows and len(self._waiting) + (self._running is not None) > self._limit:
            raise too_busy(f"{self._limit} requests are waiting already: try again later", self._retry_after())

    def cancel(self, job: Job, reason: ApiError) -> None:
        """End a job early, whether it waits, runs or is over."""
        job.cancel(reason)
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self._metrics.queued.set(len(self._waiting))
                job.put(reason)

    def refuse(self) -> None:
        """Accept no more jobs and cancel the waiting ones; the running one continues."""
        with self._changed:
            self._closing = True
            waiting = list(self._waiting)
            self._changed.notify()
        for job in waiting:
            self.cancel(job, shutting_down())

    def close(self, timeout: float) -> None:
        """Stop everything, and wait at most `timeout` seconds for the current pass."""
        self.cancel_running()
        self.refuse()
        self._thread.join(timeout)
        if self._draft_table is not None and not self._thread.is_alive():
            self._learned.save(self._draft_table, self._numbering)

    def give_up(self, error: Exception) -> None:
        """End the server, since the engine can't be used any more."""
        with self._changed:
            if self.error is not None or self._closing:
                return
            self.error = error
        log.error("the engine can't go on: %s", one_line(error))
        self.refuse()
        self.stop()

    def cancel_running(self) -> None:
        """Stop the running job after its current pass."""
        with self._changed:
            if self._running is not None:
                self._running.cancel(shutting_down())

    def _retry_after(self) -> int:
        return max(1, min(LONGEST_RETRY, math.ceil(self._seconds)))

    def _work(self) -> None:
        while (job := self._next()) is not None:
            start = time.perf_counter()
            self._metrics.queue_seconds.observe(start - job.submitted)
            try:
                self._answer(job)
            except _CancelledError:
                job.put(job.cancelled or broken())
            except AdapterError as error:  # the session has changed nothing yet
                job.put(invalid(str(error), "model"))
            except NotFiniteError as error:
                log.error("a request failed: %s", error)
                job.put(broken())
                self._start_afresh()
            except DecodeError as error:  # in mid-answer: foreseeable errors are reported before queueing
                job.put(invalid(str(error)))
                self._start_afresh()
            except Exception:
                log.exception("a request failed")
                job.put(broken())
                self._start_afresh()
            finally:
                self._seconds += 0.2 * (time.perf_counter() - start - self._seconds)
                with self._changed:
                    self._running = None
                self._metrics.running.set(0)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if self._closing:
                return None
            self._running = self._waiting.take()
            self._metrics.queued.set(len(self._waiting))
            self._metrics.running.set(1)
            return self._running

    def _answer(self, job: Job) -> None:
        awaited = True
        for event in self._events(job.work):
            if isinstance(event, GenerationResult | LabelScores):
                self._metrics.request_seconds.observe(time.perf_counter() - job.submitted)
                if isinstance(job.work, Work) and isinstance(event, GenerationResult):
                    self._metrics.completed(job.work.drafter, event, job.work.adapter)
                elif isinstance(event, LabelScores):
                    self._metrics.decided(event)
                job.put(event)
                return
            if isinstance(event, PrefillEvent) and event.scored:
                job.put(event)
            if isinstance(event, TokenEvent):
                if awaited:
                    self._metrics.first_token_seconds.observe(time.perf_counter() - job.submitted)
                awaited = False
                job.put(event)
            if job.cancelled is not None:
                raise _CancelledError

    def _events(self, work: Work | DecideWork) -> Iterator[PrefillEvent | TokenEvent | GenerationResult | LabelScores]:
        """Yield the events of a request, pass by pass, and its result."""
        self._session.use_adapter(work.adapter)
        if isinstance(work, DecideWork):
            yield from score_labels(self._session, work.prompt, work.labels, logprobs=work.logprobs)
            return
        drafter, policy = self._helpers_for(work.drafter)
        yield from generate(
            self._session,
            work.prompt,
            max_new_tokens=work.max_new_tokens,
            eos=work.eos,
            drafter=drafter,
            policy=policy,
            options=work.options,
        )

    def _helpers_for(self, name: str) -> tuple[Drafter, DraftPolicy]:
        """Return the resident drafter of that name, and its policy, which has learned how good its drafts are."""
        if name not in self._helpers:
            model = self._model
            drafter = create_drafter(
                name,
                draft_session=model.draft_session,
                vocab=model.engine.vocab,
                learned=self._learned,
                head=model.head,
                context_policy=self._context_policy,
            )
            policy = create_policy(self._policy, self._session.widths, costs=self._costs)
            self._helpers[name] = drafter, policy
        return self._helpers[name]

    def _new_session(self) -> Session:
        return Session(self._model.engine, context_policy=self._context_policy, prefixes=self._prefixes)

    def _keep_opening(self) -> None:
        if self._opening and self._prefixes is not None:
            keep_opening(self._model, self._session, self._prefixes, self._opening)

    def _start_afresh(self) -> None:
        """Drop all state of a failed request; end the server if that is impossible."""
        try:
            self._helpers.clear()
            if self._prefixes is not None:
                self._prefixes.clear()
            self._session = self._new_session()
            try:
                self._keep_opening()
            except Exception as error:  # the requests themselves may fare better
                log.warning("the system prompt is not kept: %s", one_line(error))
                self._session = self._new_session()
        except Exception as error:
            self.give_up(error)
