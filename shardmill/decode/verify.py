"""One pass: run the pending token and its drafts, and say which tokens come out."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.decode.accept import accept
from shardmill.decode.drafters.base import Draft
from shardmill.decode.engine import Logits
from shardmill.decode.sampler import Sampler
from shardmill.decode.session import Session


@dataclass(frozen=True)
class Verified:
    """Tokens that a pass emits, the row [V] that each was chosen from, and how the drafts fared.

    `seconds` is the engine's time for the pass, without the `guard_seconds` that running rows again took.
    """

    tokens: tuple[int, ...]
    rows: tuple[Logits, ...]
    accepted: int
    verified_again: int = 0
    seconds: float = 0.0
    guard_seconds: float = 0.0


def verify(
    session: Session,
    pending: int,
    draft: Draft,
    sampler: Sampler,
    *,
    eos: Collection[int],
    guard_margin: float = 0.0,
) -> Verified:
    """Feeds `[pending, *draft]`, commits what is right, and returns what is emitted.

    Args:
        guard_margin: rows of a wider call whose two best tokens are less than this apart are run again as
            a single token, for engines whose rows differ in their last bits with the width of the call.
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

    verdict = accept(choose, draft.tokens, eos, ends=lambda: sampler.finished)
    session.commit(1 + verdict.accepted)
    rows_used = tuple(chosen[: len(verdict.tokens)])
    return Verified(verdict.tokens, rows_used, verdict.accepted, len(guard), seconds, sum(guard))


def log_probabilities(row: Logits, token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of `token` under logits [V], and the `top` likeliest tokens with theirs."""
    logits = row.astype(np.float64)
    logits -= logits.max()
    logs = logits - np.log(np.exp(logits).sum())
    best: Sequence[int] = np.argsort(-logs, kind="stable")[:top].tolist()
    return float(logs[token]), tuple((t, float(logs[t])) for t in best)
