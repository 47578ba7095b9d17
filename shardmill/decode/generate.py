"""The decoding loop: prefill a prompt, then pass after pass draft, verify, accept, until something ends it.

An event is yielded as soon as its token is final; the last item is the result. For any drafter and policy, greedy
tokens equal the tokens of plain one-token decoding, and sampled tokens have the model's distribution.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from shardmill.decode.constraint import Constraint
from shardmill.decode.drafters import EMPTY, Draft, Drafter, RequestInfo
from shardmill.decode.drafters.base import NoDrafter, shorten, usable
from shardmill.decode.engine import DecodeError
from shardmill.decode.policies import UNSTATED, DraftPolicy, PassReport, create_policy, worth_drafting
from shardmill.decode.sampler import Sampler, Sampling, log_probabilities
from shardmill.decode.session import Prefill, Session
from shardmill.decode.text import Detokenize, TextStream
from shardmill.decode.verify import Verified, agreement, verify_draft


@dataclass(frozen=True)
class Options:
    """How a request is decoded, apart from its prompt and length.

    Attributes:
        detokenize: tokens of a text -> the text; incomplete characters become U+FFFD, as in every tokenizer.
        stop: strings that end the output; they need `detokenize`.
        constraint: a grammar that the output must obey; a new one for every request.
        top_logprobs: report each token's log-probability and this many of the likeliest; None: neither.
        guard_margin: see `verify.verify`; 0 switches the guard off.
        private: the drafter may keep nothing of this request and use nothing kept from other requests.
    """

    sampling: Sampling = field(default_factory=Sampling)
    detokenize: Detokenize | None = None
    stop: Sequence[str] = ()
    constraint: Constraint | None = None
    top_logprobs: int | None = None
    guard_margin: float = 0.0
    private: bool = False


FinishReason = Literal["eos", "length", "context", "stop"]


@dataclass(frozen=True)
class PrefillEvent:
    """Progress after a pass of the prompt: `held` of its `total` tokens are in the slots. The caller may stop here."""

    held: int
    total: int


@dataclass(frozen=True)
class TokenEvent:
    """One emitted token.

    Attributes:
        from_draft: True if the drafter had proposed it.
        text: text that became final with it; empty without a detokeniser, or while text is held back.
        logprob: the model's log-probability for the token, before temperature and filters; None unless requested.
        top: the model's likeliest tokens and their log-probabilities.
        start: offset in the text at which this token's text begins, in characters.
        end: offset of the end of this token's text, including a partial character or stop string. A later token that
            completes a character may have a lower `end`; the lower value then applies to this token too.
    """

    token: int
    from_draft: bool
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """The output of a request, and its cost.

    Attributes:
        tokens: emitted tokens, including a final EOS; the first comes from the prefill.
        text: their text up to the stop string, if there is a detokeniser.
        tail: the end of `text` that no event carried, held back because it might have changed or begun a stop string.
        finish_reason: "eos", "length" (max_new_tokens), "context" (slots used up) or "stop" (a stop string, or a
            grammar that is complete).
        prompt_tokens: length of the prompt.
        reused_tokens: prompt tokens that were reused from the KV cache.
        prefill_passes: engine calls for the prompt.
        accepted: drafts accepted, per decode pass.
        drafted: drafts verified, per decode pass.
        pass_seconds: the engine's time, per decode pass.
        verified_again: rows that the exactness guard ran again alone.
        prefill_seconds: the engine's time for the prompt.
        decode_seconds: from the end of the prefill to the last token, without the time that the caller took between
            tokens.
        drafter_seconds: time for proposing and observing.
    """

    tokens: tuple[int, ...]
    text: str
    tail: str
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    prefill_passes: int
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    pass_seconds: tuple[float, ...]
    verified_again: int
    prefill_seconds: float
    decode_seconds: float
    drafter_seconds: float

    @property
    def passes(self) -> int:
        """Return the number of decode passes."""
        return len(self.accepted)

    @property
    def tokens_per_pass(self) -> float:
        """Return the decoded tokens per decode pass; 0 without a pass."""
        return (len(self.tokens) - 1) / self.passes if self.passes else 0.0


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
    context: list[int]
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
        max_new_tokens: the most tokens to generate.
        eos: tokens that end the output.
        drafter: proposes drafts; by default none.
        policy: how much to draft; by default the cost model, without measurements.
        options: sampling, stop strings, grammar and more; by default greedy decoding.

    Raises:
        DecodeError: an empty prompt, a prompt that is longer than the context, or invalid settings.
    """
    prompt = [int(t) for t in prompt]  # also for arrays: drafters compare token types
    return _events(_start(session, prompt, max_new_tokens, eos, drafter, policy, options or Options()), prompt)


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
    request.policy.start(request.end - request.prompt_tokens)
    prefill, seconds = yield from _prefill(request, prompt)
    first = Verified((request.sampler.next(prefill.row),), (prefill.row,), 0)
    start = time.perf_counter()
    sampling = request.options.sampling
    request.drafter.reset(prompt, RequestInfo(request.options.private, sampling.temperature, sampling.seed))
    request.drafter.observe(first.tokens, 0)
    request.drafter_seconds = time.perf_counter() - start
    reason = yield from _emit(request, first)
    while reason is None:
        reason = yield from _emit(request, _decode_pass(request))
    request.drafter.finish()
    yield _result(request, prefill, reason, seconds, time.perf_counter() - start - request.suspended_seconds)


def _prefill(request: _Request, prompt: Sequence[int]) -> Generator[PrefillEvent, None, tuple[Prefill, float]]:
    """Yield after each pass; return the prefilled prompt and the total seconds of its passes."""
    total = 0.0
    start = time.perf_counter()
    for prefill in request.session.prefill_passes(prompt):
        seconds = time.perf_counter() - start
        total += seconds
        if prefill.row.size and prefill.width in request.session.widths:  # like a decode pass, with logits
            request.policy.timed(prefill.width, seconds)
        yield PrefillEvent(prefill.held, len(prompt))
        start = time.perf_counter()
    return prefill, total


def _start(
    session: Session,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Collection[int],
    drafter: Drafter | None,
    policy: DraftPolicy | None,
    options: Options,
) -> _Request:
    session.check_prompt(prompt)
    if max_new_tokens < 1:
        raise DecodeError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
    if options.stop and options.detokenize is None:
        raise DecodeError("stop strings need a detokeniser")
    return _Request(
        session=session,
        drafter=drafter or NoDrafter(),
        policy=policy or create_policy("cost_model", session.widths),
        sampler=Sampler(options.sampling, prompt, session.engine.vocab, options.constraint),
        options=options,
        eos=eos,
        context=list(prompt),
        prompt_tokens=len(prompt),
        end=len(prompt) + max_new_tokens,
        drafting=worth_drafting(max_new_tokens, options.sampling.temperature),
        stream=TextStream(options.detokenize, options.stop, prompt) if options.detokenize else None,
    )


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
    _count(request, draft, verified, drafter_seconds)
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


def _count(request: _Request, draft: Draft, verified: Verified, drafter_seconds: float) -> None:
    request.accepted.append(verified.accepted)
    request.drafted.append(len(draft.tokens))
    request.pass_seconds.append(verified.seconds + verified.guard_seconds)
    request.verified_again += verified.verified_again
    request.drafter_seconds += drafter_seconds


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
    prompt_tokens = request.prompt_tokens
    return GenerationResult(
        tokens=tuple(request.context[prompt_tokens:]),
        text=request.text + tail,
        tail=tail,
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
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
