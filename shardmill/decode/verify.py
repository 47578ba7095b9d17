"""One pass: run the pending token and its drafts, and keep the drafts that the model itself would have produced.

A pass feeds `[pending, d1 .. dk]`. Row i contains the logits after the i-th fed token, so d(i+1) is right when row i
chooses it, and the row after the last right draft chooses the bonus token. A pass emits 1..k+1 tokens.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shardmill.decode.drafters.base import Draft
from shardmill.decode.engine import Logits
from shardmill.decode.sampler import Sampler
from shardmill.decode.session import Session


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
