"""The decoding loop: prefill a prompt, then pass after pass draft, verify, accept, until something ends it.

An event is yielded as soon as its token is final; the last item is the result. For any drafter and policy, greedy
tokens equal the tokens of plain one-token decoding, and sampled tokens have the model's distribution.

A pass feeds `[pending, d1 .. dk]`. Row i contains the logits after the i-th fed token, so d(i+1) is right when row i
chooses it, and the row after the last right draft chooses the bonus token. A pass emits 1..k+1 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from drafted_decoding.drafters import EMPTY, Draft, Drafter, RequestInfo
from drafted_decoding.drafters.base import NoDrafter
from drafted_decoding.engine import DecodeError, Logits
from drafted_decoding.policies import UNSTATED, DraftPolicy, PassReport, create_policy, worth_drafting
from drafted_decoding.request import FinishReason, GenerationResult, Options, PrefillEvent, PromptLogprob, TokenEvent
from drafted_decoding.sampler import Sampler, log_probabilities
from drafted_decoding.session import Prefill, Session
from drafted_decoding.text import TextStream


def usable(draft: Draft, limit: int, vocab: int) -> Draft:
    """Return the part of `draft` that an engine can verify, so that no drafter can break decoding.

    It ends at `limit`, or before the first token outside the vocabulary. Confidences that do not fit the tokens are
    dropped. Drawn tokens can't be verified without fitting distributions; without them the result is empty.
    """
    tokens = draft.tokens[:limit]
    length = next((i for i, token in enumerate(tokens) if not 0 <= token < vocab), len(tokens))
    if draft.distributions is not None and draft.distributions.shape != (len(draft.tokens), vocab):
        return EMPTY
    sure = draft.confidence
    if sure and (len(sure) != len(draft.tokens) or not all(0 <= c <= 1 for c in sure)):
        draft = replace(draft, confidence=())
    return shorten(draft, length)


def shorten(draft: Draft, length: int) -> Draft:
    """Return the first `length` tokens of `draft`, with their confidences and distributions."""
    if length >= len(draft.tokens):
        return draft
    distributions = None if draft.distributions is None else draft.distributions[:length]
    return replace(
        draft, tokens=draft.tokens[:length], confidence=draft.confidence[:length], distributions=distributions
    )


@dataclass(frozen=True)
class Outcome:
    """The tokens that a pass emits; the first `accepted` tokens are drafts."""

    tokens: tuple[int, ...]
    accepted: int


def accept(
    choose: Callable[[int], int],
    draft: Sequence[int],
    eos: Collection[int],
    ends: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Accept the longest prefix of `draft` that equals the model's choices.

    Args:
        choose: returns the model's token after fed token i; called in order, and never past the first wrong draft.
        draft: the k tokens fed after the pending one.
        eos: tokens that end the text; if one is accepted the pass ends there, without a bonus token.
        ends: called after each accepted token; returns whether the text ends there for another reason.
    """
    tokens: list[int] = []
    for i, drafted in enumerate(draft):
        token = choose(i)
        tokens.append(token)
        if token != drafted:
            return Outcome(tuple(tokens), i)
        if token in eos or ends():
            return Outcome(tuple(tokens), i + 1)
    tokens.append(choose(len(draft)))
    return Outcome(tuple(tokens), len(draft))


def agreement(draft: Sequence[int], emitted: Sequence[int]) -> int:
    """Return how many tokens of `draft`, counted from the first, equal the emitted ones."""
    for i, (drafted, token) in enumerate(zip(draft, emitted, strict=False)):
        if drafted != token:
            return i
    return min(len(draft), len(emitted))


@dataclass(frozen=True)
class Verified:
    """The output and the cost of a pass.

    Attributes:
        tokens: the tokens that the pass emits.
        rows: for each token, the logits [V] that decided it.
        accepted: how many of the tokens are drafts.
        verified_again: rows that were run again alone.
        seconds: the engine's time for the pass, without `guard_seconds`.
        guard_seconds: the engine's time for running rows again.
    """

    tokens: tuple[int, ...]
    rows: tuple[Logits, ...]
    accepted: int
    verified_again: int = 0
    seconds: float = 0.0
    guard_seconds: float = 0.0


def verify_draft(
    session: Session,
    pending: int,
    draft: Draft,
    sampler: Sampler,
    *,
    eos: Collection[int],
    guard_margin: float = 0.0,
) -> Verified:
    """Feed `[pending, *draft]`, commit the right tokens, and return the emitted ones.

    Args:
        session: the session to feed.
        pending: the last emitted token, which has not run yet.
        draft: the proposed tokens.
        sampler: chooses tokens from rows of logits.
        eos: tokens that end the text.
        guard_margin: rows of a wider call whose two best tokens are closer than this run again as a single token. It
            is for engines whose rows differ in their last bits with the width of the call.
    """
    start = time.perf_counter()
    rows = session.feed([pending, *draft.tokens])  # [k + 1, V]
    seconds = time.perf_counter() - start
    chosen: list[Logits] = []
    guard: list[float] = []

    def choose(i: int) -> int:
        row = rows[i]
        if draft.tokens and guard_margin > 0 and sampler.margin(row) < guard_margin:
            start = time.perf_counter()
            row = session.refeed(i)
            guard.append(time.perf_counter() - start)
        chosen.append(row)
        if i == len(draft.tokens):
            return sampler.next(row)
        drawn_from = None if draft.distributions is None else draft.distributions[i]
        return sampler.check(row, draft.tokens[i], drawn_from)

    outcome = accept(choose, draft.tokens, eos, ends=lambda: sampler.finished)
    session.commit(1 + outcome.accepted)
    rows_used = tuple(chosen[: len(outcome.tokens)])
    return Verified(outcome.tokens, rows_used, outcome.accepted, len(guard), seconds, sum(guard))


Events = Generator[PrefillEvent | TokenEvent | GenerationResult, None, None]


@dataclass
class _Request:
    """A request in progress."""

    session: Session
    drafter: Drafter
    policy: DraftPolicy
    sampler: Sampler
    options: Options
    eos: Collection[int]
    context: list[int]  # what the drafter sees: the text, perhaps without tokens beyond the vocabulary
    begin: int  # length of the context before the first emitted token
    prompt_tokens: int
    end: int  # length of the context after max_new_tokens
    drafting: bool
    stream: TextStream | None
    text: str = ""
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    pass_seconds: list[float] = field(default_factory=list)
    verified_again: int = 0
    drafter_seconds: float = 0.0
    suspended_seconds: float = 0.0  # spent by the caller between tokens


def generate(
    session: Session,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    drafter: Drafter | None = None,
    policy: DraftPolicy | None = None,
    options: Options | None = None,
) -> Events:
    """Return a generator of a `PrefillEvent` per prompt pass, a `TokenEvent` per token, and a `GenerationResult`.

    Errors in a request are raised at once, before the first event is requested.

    The session may contain an earlier request: the prefix that both prompts share is not run again. A drafter and a
    policy may serve many requests, one at a time. Closing the iterator abandons the request and leaves everything
    usable.

    Args:
        session: the engine's slots, with the text of the previous request.
        prompt: tokens.
        max_new_tokens: the most tokens to generate; 0: the prompt alone runs.
        eos: tokens that end the output.
        drafter: proposes drafts; by default none.
        policy: how much to draft; by default the cost model, without measurements.
        options: sampling, stop strings, grammar and more; by default greedy decoding.

    Raises:
        DecodeError: an empty prompt, a prompt that is longer than the context, or invalid settings.
    """
    drafter = drafter or NoDrafter()
    prompt, options = [int(t) for t in prompt], options or Options()  # also for arrays: drafters compare token types
    session.check_prompt(prompt)
    if max_new_tokens < 0:
        raise DecodeError(f"max_new_tokens is {max_new_tokens}: it must be at least 0")
    if options.stop and options.detokenize is None:
        raise DecodeError("stop strings need a detokeniser")
    # Tokens beyond the vocabulary have no text and no logits: only the session sees them, and drafters that ask to.
    words = [t for t in prompt if t < session.engine.vocab]
    if len(words) < len(prompt) and options.prompt_logprobs is not None:
        raise DecodeError("log-probabilities of a prompt with pictures or sounds can't be had: ask for the answer's")
    context = list(prompt) if getattr(drafter, "beyond", False) else words
    request = _Request(
        session=session,
        drafter=drafter,
        policy=policy or create_policy("cost_model", session.widths),
        sampler=Sampler(options.sampling, words, session.engine.vocab, options.constraint),
        options=options,
        eos=eos,
        context=context,
        begin=len(context),
        prompt_tokens=len(prompt),
        end=len(context) + max_new_tokens,
        drafting=worth_drafting(max_new_tokens, options.sampling.temperature),
        stream=TextStream(options.detokenize, options.stop, words, keep_stop=options.keep_stop)
        if options.detokenize
        else None,
    )
    return _events(request, prompt)


def run(
    session: Session,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    drafter: Drafter | None = None,
    policy: DraftPolicy | None = None,
    options: Options | None = None,
) -> GenerationResult:
    """Run `generate` to its end and return the result."""
    *_, result = generate(
        session, prompt, max_new_tokens=max_new_tokens, eos=eos, drafter=drafter, policy=policy, options=options
    )
    assert isinstance(result, GenerationResult)
    return result


def _events(request: _Request, prompt: Sequence[int]) -> Events:
    request.policy.start(request.end - request.begin)
    prefill, seconds = yield from _prefill(request, prompt)
    if request.end == request.begin:
        yield _result(request, prefill, "length", seconds, 0.0)
        return
    first = Verified((request.sampler.next(prefill.row),), (prefill.row,), 0)
    start = time.perf_counter()
    sampling = request.options.sampling
    info = RequestInfo(request.options.private, sampling.temperature, sampling.seed)
    request.drafter.reset(list(request.context), info)
    request.drafter.observe(first.tokens, 0)
    request.drafter_seconds = time.perf_counter() - start
    reason = yield from _emit(request, first)
    while reason is None:
        reason = yield from _emit(request, _decode_pass(request))
    request.drafter.finish()
    yield _result(request, prefill, reason, seconds, time.perf_counter() - start - request.suspended_seconds)


def _prefill(request: _Request, prompt: Sequence[int]) -> Generator[PrefillEvent, None, tuple[Prefill, float]]:
    """Yield after each pass; return the prefilled prompt and the total seconds of its passes."""
    total, top = 0.0, request.options.prompt_logprobs
    start = time.perf_counter()
    for prefill in request.session.prefill_passes(prompt, private=request.options.private, scored=top is not None):
        seconds = time.perf_counter() - start
        total += seconds
        if prefill.row.size and prefill.width in request.session.widths:  # like a decode pass, with logits
            request.policy.timed(prefill.width, seconds)
        scored = () if top is None else _scored(prompt, prefill.held - len(prefill.rows), prefill.rows, top)
        yield PrefillEvent(prefill.held, len(prompt), scored)
        start = time.perf_counter()
    return prefill, total


def _scored(prompt: Sequence[int], first: int, rows: Logits, top: int) -> tuple[PromptLogprob, ...]:
    """Return how likely the prompt's tokens are after position `first` and later ones, given the logits [V] there."""
    scored = [PromptLogprob(prompt[0])] if first == 0 else []
    for token, row in zip(prompt[first + 1 :], rows, strict=False):  # nothing follows the last token
        logprob, likeliest = log_probabilities(row, token, top)
        scored.append(PromptLogprob(token, logprob, 1 + int(np.count_nonzero(row > row[token])), likeliest))
    return tuple(scored)


def _decode_pass(request: _Request) -> Verified:
    session, context = request.session, request.context
    start = time.perf_counter()
    proposed, asked = _propose(request, min(session.room(), request.end - len(context)) - 1)
    draft = shorten(proposed, request.policy.length(proposed))
    proposing = time.perf_counter() - start
    verified = verify_draft(
        session, context[-1], draft, request.sampler, eos=request.eos, guard_margin=request.options.guard_margin
    )
    answered = time.perf_counter()
    request.drafter.observe(verified.tokens, verified.accepted)
    drafter_seconds = time.perf_counter() - answered + proposing
    request.accepted.append(verified.accepted)
    request.drafted.append(len(draft.tokens))
    request.pass_seconds.append(verified.seconds + verified.guard_seconds)
    request.verified_again += verified.verified_again
    request.drafter_seconds += drafter_seconds
    request.policy.observe(
        PassReport(
            width=session.pass_width(1 + len(draft.tokens)),
            drafted=len(draft.tokens),
            accepted=verified.accepted,
            confidence=(proposed.confidence or (UNSTATED,) * len(proposed.tokens))[: len(verified.tokens)],
            right=agreement(proposed.tokens, verified.tokens),
            seconds=verified.seconds,
            drafter_seconds=drafter_seconds,
            guard_seconds=verified.guard_seconds,
            asked=asked,
        )
    )
    return verified


def _propose(request: _Request, most: int) -> tuple[Draft, bool]:
    """Return the draft to verify, before the policy cuts it, and whether the drafter was asked for it."""
    forced = tuple(request.sampler.forced()[: max(0, most)])
    if forced:
        return Draft(forced, (1.0,) * len(forced)), False
    limit = request.policy.limit(most) if request.drafting and most > 0 else 0
    if limit == 0:
        return EMPTY, False
    draft = usable(request.drafter.propose(request.context, limit), limit, request.session.engine.vocab)
    if draft.tokens and draft.distributions is None:  # a drawn token must be rejected, not left out: see `Draft`
        draft = shorten(draft, request.sampler.valid_prefix(draft.tokens))
    return draft, True


def _emit(request: _Request, verified: Verified) -> Generator[TokenEvent, None, FinishReason | None]:
    """Yield a pass's tokens, up to one that ends the request; return the reason if it has ended."""
    for i, (token, row) in enumerate(zip(verified.tokens, verified.rows, strict=True)):
        request.context.append(token)
        event = _told(request, TokenEvent(token, i < verified.accepted))
        request.text += event.text
        if request.options.top_logprobs is not None:
            logprob, top = log_probabilities(row, token, request.options.top_logprobs)
            event = replace(event, logprob=logprob, top=top)
        handed = time.perf_counter()
        yield event
        request.suspended_seconds += time.perf_counter() - handed
        reason = _finish_reason(request, token, last=i == len(verified.tokens) - 1)
        if reason is not None:
            return reason
    return None


def _told(request: _Request, event: TokenEvent) -> TokenEvent:
    """Return the event with the token's text and its offsets in the whole text."""
    stream = request.stream
    if stream is None:
        return event
    start = stream.final
    text = stream.push(event.token) if event.token not in request.eos else ""
    return replace(event, text=text, start=start, end=stream.length)


def _finish_reason(request: _Request, token: int, *, last: bool) -> FinishReason | None:
    if token in request.eos:
        return "eos"
    if (request.stream and request.stream.stopped) or (last and request.sampler.finished):
        return "stop"
    if len(request.context) >= request.end:
        return "length"
    if last and request.session.room() == 0:
        return "context"
    return None


def _result(
    request: _Request, prefill: Prefill, reason: FinishReason, prefill_seconds: float, decode_seconds: float
) -> GenerationResult:
    tail = request.stream.flush() if request.stream else ""
    return GenerationResult(
        tokens=tuple(request.context[request.begin :]),
        text=request.text + tail,
        tail=tail,
        finish_reason=reason,
        prompt_tokens=request.prompt_tokens,
        reused_tokens=prefill.reused,
        prefill_passes=prefill.passes,
        accepted=tuple(request.accepted),
        drafted=tuple(request.drafted),
        pass_seconds=tuple(request.pass_seconds),
        verified_again=request.verified_again,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        drafter_seconds=request.drafter_seconds,
    )
