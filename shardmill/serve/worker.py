"""The one thread that runs the engine, and the bounded queue in front of it.

Requests run one at a time in the order of their arrival. The thread never waits for a client: it puts tokens into the
job and goes on. It looks for a cancellation before every pass, those of a prompt included.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from shardmill.decode import (
    ContextPolicy,
    DecodeError,
    Drafter,
    DraftPolicy,
    GenerationResult,
    LearnedDrafter,
    Session,
    TokenEvent,
    create_drafter,
    create_policy,
    generate,
    measure_widths,
)
from shardmill.decode.drafters.follow_file import Numbering
from shardmill.printable import one_line
from shardmill.serve.errors import ApiError, broken, invalid, shutting_down, too_busy
from shardmill.serve.job import Done, Job
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model

log = logging.getLogger(__name__)
LONGEST_RETRY = 60  # seconds; openai's client obeys no longer Retry-After


class _CancelledError(Exception):
    """The running job has been told to end."""


class Worker:
    """Answers jobs with a model.

    Args:
        model: what answers; its engine is the worker's alone.
        metrics: what is counted.
        queue: jobs that may wait while one runs.
        policy: how much is drafted, by name.
        draft_table: what `learned` begins with, if there is such a file; `close` writes it.
        context_policy: what happens once the context is full.

    Attributes:
        stop: ends the server; called if the engine can't be used any more.
        error: why it can't.

    Raises:
        DecodeError: the context is too small to slide, the draft model has another vocabulary, no policy has that
            name, or the table is damaged or another model's, which is refused as it would be overwritten at the end.
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
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._limit = queue
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._seconds = 1.0  # what a request takes; a running average
        self._costs = measure_widths(model.engine)  # also the first, slow calls of each width
        self._context_policy = context_policy
        self._session = Session(model.engine, context_policy=context_policy)
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
            self._helpers_for("draft_model")  # a draft model that does not fit is told before anyone asks
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Starts answering."""
        self._thread.start()

    @property
    def is_well(self) -> bool:
        """Whether a request that comes now will be answered."""
        return self._thread.is_alive() and not self._closing

    def submit(self, job: Job) -> None:
        """Queues a job.

        Raises:
            ApiError: 429 where the queue is full, 503 once the server shuts down.
        """
        with self._changed:
            if self._closing:
                raise shutting_down()
            if len(self._waiting) + (self._running is not None) > self._limit:
                raise too_busy(f"{self._limit} requests are waiting already: try again later", self._retry_after())
            self._waiting.append(job)
            self._metrics.queued.set(len(self._waiting))
            self._changed.notify()

    def cancel(self, job: Job, reason: ApiError) -> None:
        """Ends a job early, whether it waits, runs or is over."""
        job.cancel(reason)
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self._metrics.queued.set(len(self._waiting))
                job.put(reason)

    def refuse(self) -> None:
        """Takes no more jobs and ends those that wait; the running one goes on."""
        with self._changed:
            self._closing = True
            waiting = list(self._waiting)
            self._changed.notify()
        for job in waiting:
            self.cancel(job, shutting_down())

    def close(self, timeout: float) -> None:
        """Ends everything, and waits that long for the pass under way."""
        self.cancel_running()
        self.refuse()
        self._thread.join(timeout)
        if self._draft_table is not None and not self._thread.is_alive():
            self._learned.save(self._draft_table, self._numbering)

    def cancel_running(self) -> None:
        """Ends the running job after its current pass."""
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
            except DecodeError as error:  # in mid-answer: what can be known before is refused before it is queued
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
            self._running = self._waiting.popleft()
            self._metrics.queued.set(len(self._waiting))
            self._metrics.running.set(1)
            return self._running

    def _answer(self, job: Job) -> None:
        work = job.work
        drafter, policy = self._helpers_for(work.drafter)
        events = generate(
            self._session,
            work.prompt,
            max_new_tokens=work.max_new_tokens,
            eos=self._model.eos,
            drafter=drafter,
            policy=policy,
            options=work.options,
        )
        awaited = True
        for event in events:
            if isinstance(event, GenerationResult):
                self._metrics.request_seconds.observe(time.perf_counter() - job.submitted)
                self._metrics.completed(work.drafter, event)
                job.put(Done(event))
                return
            if isinstance(event, TokenEvent):
                if awaited:
                    self._metrics.first_token_seconds.observe(time.perf_counter() - job.submitted)
                awaited = False
                job.put(event)
            _stop_if_cancelled(job)

    def _helpers_for(self, name: str) -> tuple[Drafter, DraftPolicy]:
        """The resident drafter of that name, and the policy that has learned what its drafts are worth."""
        if name not in self._helpers:
            model = self._model
            drafter = create_drafter(
                name, draft_session=model.draft_session, vocab=model.engine.vocab, learned=self._learned
            )
            policy = create_policy(self._policy, self._session.widths, costs=self._costs)
            self._helpers[name] = drafter, policy
        return self._helpers[name]

    def _start_afresh(self) -> None:
        """Drop everything that a failed request may have left half done; end the server if that can't be done."""
        try:
            self._helpers.clear()
            self._session = Session(self._model.engine, context_policy=self._context_policy)
        except Exception as error:
            log.error("the engine can't go on: %s", one_line(error))
            self.error = error
            self.refuse()
            self.stop()


def _stop_if_cancelled(job: Job) -> None:
    if job.cancelled is not None:
        raise _CancelledError
