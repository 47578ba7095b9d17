"""One thread owns the engine. Answers take turns of a few passes, and each answer goes to its job token by token.

Between the turns of an answer its text is set aside: copies of the slots bring the text back, so no token is run twice.
Each answer is the one that the request would get alone.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from drafted_decoding import (
    ContextPolicy,
    DecodeError,
    Drafter,
    DraftPolicy,
    GenerationResult,
    LabelScores,
    LearnedDrafter,
    NotFiniteError,
    PrefillEvent,
    PrefixCache,
    Session,
    SetAside,
    TokenEvent,
    create_drafter,
    create_policy,
    generate,
    measure_widths,
    score_labels,
)
from drafted_decoding.drafters import DRAFT_MODEL, TRAINED
from drafted_decoding.drafters.follow import Numbering

from shardmill.errors import AdapterError, EngineGoneError
from shardmill.media.prompt import Row
from shardmill.printable import one_line
from shardmill.serve.jobs import DecideWork, FairQueue, Job, Work
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model
from shardmill.serve.opening import keep_opening
from shardmill.serve.pictures import Gallery, Shower
from shardmill.serve.protocol import ApiError, broken, invalid, shutting_down, too_busy

log = logging.getLogger(__name__)
LONGEST_RETRY = 60  # seconds; openai's client ignores a longer Retry-After
SLICE = 8  # passes of an answer, after which it lets others run
SET_ASIDE, SET_ASIDE_BYTES = 8, 1 << 30  # answers that wait set aside, and all copies; one beyond runs to its end

Events = Generator[PrefillEvent | TokenEvent | GenerationResult | LabelScores, None, None]


class _CancelledError(Exception):
    """The running job was cancelled."""


@dataclass(eq=False)
class _Answer:
    """An answer that has begun.

    Attributes:
        events: what its passes give, and at last the result.
        sessions: the sessions that hold a text of it.
        helpers: its drafter and the policy, which no other answer uses meanwhile.
        copies: by session, the text that was set aside.
        tokens: how many have been sent.
        seconds: the time of its slices so far.
        stays: whether it was counted as one that can't be set aside.
        rows: the rows of pictures that its prompt has.
    """

    events: Events
    sessions: tuple[Session, ...]
    helpers: tuple[Drafter, DraftPolicy] | None = None
    copies: dict[Session, SetAside] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    stays: bool = False
    rows: tuple[Row, ...] = ()


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
        self._begun: dict[Job, _Answer] = {}
        self._ended: list[_Answer] = []  # of jobs that were cancelled while they waited for a further turn
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
        self._session = Session(model.engine, context_policy=context_policy, prefixes=self._prefixes)
        self._keep_opening()
        self._policy, self._draft_table = policy, draft_table
        self._numbering = Numbering(model.engine.vocab, model.tokenizer_digest)
        self._learned = LearnedDrafter()
        self._gallery = Gallery(cast(Shower, model.engine))
        if draft_table is not None and draft_table.exists():
            self._learned.load(draft_table, self._numbering)
        self.stop: Callable[[], None] = lambda: None
        self.error: Exception | None = None
        self._idle = defaultdict[str, list[tuple[Drafter, DraftPolicy]]](list)  # drafters that no answer uses
        for name in ("learned", *([DRAFT_MODEL] if model.draft_session is not None else [])):
            self._idle[name].append(self._new_helpers(name))  # reports what is unfit before the first request
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
                if job in self._begun:
                    self._ended.append(self._begun.pop(job))
                    self._changed.notify()
                job.put(reason)

    def refuse(self) -> None:
        """Accept no more jobs and cancel the waiting ones; those that have begun continue."""
        with self._changed:
            self._closing = True
            waiting = [job for job in self._waiting if job not in self._begun]
            self._changed.notify()
        for job in waiting:
            self.cancel(job, shutting_down())

    def close(self, timeout: float) -> None:
        """Stop everything, and wait at most `timeout` seconds for the current pass."""
        self.refuse()
        self.cancel_running()
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
        """Stop what has begun; the running job after its current pass."""
        with self._changed:
            begun = {*self._begun, *([self._running] if self._running else [])}
        for job in begun:
            self.cancel(job, shutting_down())

    def _retry_after(self) -> int:
        return max(1, min(LONGEST_RETRY, math.ceil(self._seconds)))

    def _work(self) -> None:
        while (job := self._next()) is not None:
            start, goes_on = time.perf_counter(), False
            try:
                goes_on = self._take_turn(job)
            except _CancelledError:
                job.put(job.cancelled or broken())
            except AdapterError as error:  # the session has changed nothing yet
                job.put(invalid(str(error), "model"))
            except EngineGoneError as error:
                job.put(broken())
                self.give_up(error)
            except NotFiniteError as error:
                log.error("a request failed: %s", error)
                job.put(broken())
                self._start_afresh(job)
            except DecodeError as error:  # in mid-answer: foreseeable errors are reported before queueing
                job.put(invalid(str(error)))
                self._start_afresh(job)
            except Exception:
                log.exception("a request failed")
                job.put(broken())
                self._start_afresh(job)
            finally:
                self._stop(job, goes_on, time.perf_counter() - start)

    def _next(self) -> Job | None:
        """Wait for the next job, and free what cancelled ones have left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended or self._closing)
                ended, self._ended = self._ended, []
                if not ended and not self._waiting:
                    return None
                if not ended:
                    full = len(self._begun) > SET_ASIDE  # one more answer could not be set aside
                    self._running = self._waiting.take(self._begun if full else ())
                    self._metrics.queued.set(len(self._waiting))
                    self._metrics.running.set(1)
                    return self._running
            for answer in ended:
                self._free(answer)

    def _stop(self, job: Job, goes_on: bool, seconds: float) -> None:
        """Let a job that goes on wait for its next turn, and free what another has left."""
        with self._changed:
            self._running = None
            self._metrics.running.set(0)
            if goes_on:
                self._begun[job].seconds += seconds
                self._waiting.add(job)
                self._metrics.queued.set(len(self._waiting))
                return
            answer = self._begun.pop(job, None)
        self._seconds += 0.2 * (seconds + (answer.seconds if answer else 0.0) - self._seconds)
        if answer is not None:
            self._free(answer)

    def _free(self, answer: _Answer) -> None:
        """Free the copies and the drafter of an answer that is over."""
        try:
            answer.events.close()
            self._gallery.give_back(answer.rows)
            for session, text in answer.copies.items():
                session.drop(text)
            self._count_copies()
        except Exception as error:  # no pass: only an engine that is gone can't do that
            self.give_up(error)
        if answer.helpers is not None:
            self._idle[answer.helpers[0].name].append(answer.helpers)

    def _take_turn(self, job: Job) -> bool:
        """Run a job for a slice or to its end; return whether it goes on in a further answer."""
        if job.cancelled is not None:
            raise _CancelledError
        self._session.use_adapter(job.work.adapter)
        if job not in self._begun:
            self._metrics.queue_seconds.observe(time.perf_counter() - job.submitted)
            begun = self._begin(job.work)
            with self._changed:
                self._begun[job] = begun
        answer, passes = self._begun[job], 0
        for session, text in answer.copies.items():
            session.take_back(text)
        for event in answer.events:
            if isinstance(event, GenerationResult | LabelScores):
                self._finish(job, event)
                return False
            if isinstance(event, PrefillEvent) and event.scored:
                job.put(event)
            if isinstance(event, TokenEvent):
                if not answer.tokens:
                    self._metrics.first_token_seconds.observe(time.perf_counter() - job.submitted)
                answer.tokens += 1
                job.put(event)
            if job.cancelled is not None:
                raise _CancelledError
            # A pass ends with a token of the model's own; the first comes from the prompt's last pass.
            passes += not (isinstance(event, TokenEvent) and (event.from_draft or answer.tokens == 1))
            if passes >= SLICE and not _ends(job.work, answer, event) and self._set_aside(job.work, answer):
                return True
        raise AssertionError("an answer without a result")

    def _finish(self, job: Job, result: GenerationResult | LabelScores) -> None:
        self._metrics.request_seconds.observe(time.perf_counter() - job.submitted)
        if isinstance(job.work, Work) and isinstance(result, GenerationResult):
            self._metrics.completed(job.work.drafter, result, job.work.adapter)
        elif isinstance(result, LabelScores):
            self._metrics.decided(result)
        job.put(result)

    def _begin(self, work: Work | DecideWork) -> _Answer:
        """Begin an answer; its events are what its passes give."""
        if isinstance(work, DecideWork):
            events: Events = score_labels(self._session, work.prompt, work.labels, logprobs=work.logprobs)
            return _Answer(events, (self._session,))
        rows = tuple(row for picture in work.pictures for row in picture.shown)
        self._gallery.take(rows)
        drafter, policy = helpers = self._helpers_for(work.drafter)
        try:
            events = generate(
                self._session,
                work.prompt,
                max_new_tokens=work.max_new_tokens,
                eos=work.eos,
                drafter=drafter,
                policy=policy,
                options=work.options,
            )
        except BaseException:
            self._gallery.give_back(rows)
            raise
        draft = self._model.draft_session if work.drafter == DRAFT_MODEL else None
        return _Answer(events, (self._session, draft) if draft else (self._session,), helpers, rows=rows)

    def _set_aside(self, work: Work | DecideWork, answer: _Answer) -> bool:
        """Set an answer's texts aside if a job waits; return whether that was done."""
        with self._changed:
            if not self._waiting:
                return False
            others = [one.copies for one in self._begun.values() if one is not answer and one.copies]
        room = SET_ASIDE_BYTES - sum(text.bytes for copies in others for text in copies.values())
        possible = len(others) <= SET_ASIDE and not (isinstance(work, Work) and work.drafter in TRAINED)
        for session in answer.sessions if possible else ():
            text = session.set_aside(room, answer.copies.get(session))
            if text is None:
                possible = False
                break
            answer.copies[session] = text
            room -= text.bytes
        self._metrics.turns.inc(possible)
        self._metrics.unsliced.inc(not possible and not answer.stays)
        answer.stays |= not possible
        self._count_copies()
        return possible

    def _count_copies(self) -> None:
        with self._changed:
            copies = [text.bytes for answer in self._begun.values() for text in answer.copies.values()]
        self._metrics.set_aside_bytes.set(sum(copies))

    def _helpers_for(self, name: str) -> tuple[Drafter, DraftPolicy]:
        """Return a drafter of that name that no answer uses, with its policy, which knows how good its drafts are."""
        return self._idle[name].pop() if self._idle[name] else self._new_helpers(name)

    def _new_helpers(self, name: str) -> tuple[Drafter, DraftPolicy]:
        model = self._model
        drafter = create_drafter(
            name,
            draft_session=model.draft_session,
            vocab=model.engine.vocab,
            learned=self._learned.sibling(),
            head=model.head,
            context_policy=self._context_policy,
        )
        return drafter, create_policy(self._policy, self._session.widths, costs=self._costs)

    def _keep_opening(self) -> None:
        if self._opening and self._prefixes is not None:
            keep_opening(self._model, self._session, self._prefixes, self._opening)

    def _start_afresh(self, job: Job) -> None:
        """Drop all state of a failed job; end the server if that is impossible."""
        try:
            self._idle.clear()
            if job in self._begun:
                self._begun[job].helpers = None
            if self._prefixes is not None:
                self._prefixes.clear()
            self._session.clear()
            try:
                self._keep_opening()
            except Exception as error:  # the requests themselves may fare better
                log.warning("the system prompt is not kept: %s", one_line(error))
                self._session.clear()
        except Exception as error:
            self.give_up(error)


def _ends(work: Work | DecideWork, answer: _Answer, event: PrefillEvent | TokenEvent) -> bool:
    """Return whether an answer is known to need no further pass."""
    if not isinstance(work, Work) or not isinstance(event, TokenEvent):
        return False
    return answer.tokens >= work.max_new_tokens or event.token in work.eos
