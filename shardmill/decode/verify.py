"""One pass: run the pending token and its drafts, and say which tokens come out."""

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
    """Tokens that a pass emits, the row [V] that each was chosen from, and how the drafts fared."""

    tokens: tuple[int, ...]
    rows: tuple[Logits, ...]
    accepted: int
    verified_again: int


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
        guard_margin: rows of a wider call whose two best logits are less than this apart are run again as
            a single
            token, for engines whose rows differ in their last bits with the width of the call.
    """
    rows = session.feed([pending, *draft.tokens])  # [k + 1, V]
    chosen: list[Logits] = []
    again = 0

    def choose(i: int) -> int:
        nonlocal again
        row = rows[i]
        if draft.tokens and guard_margin > 0 and _margin(row) < guard_margin:
            row = session.refeed(i)
            again += 1
        chosen.append(row)
        if i == len(draft.tokens):
            return sampler.next(row)
        drawn_from = None if draft.distributions is None else draft.distributions[i]
        return sampler.check(row, draft.tokens[i], drawn_from)

    verdict = accept(choose, draft.tokens, eos, ends=lambda: sampler.finished)
    session.commit(1 + verdict.accepted)
    return Verified(verdict.tokens, tuple(chosen[: len(verdict.tokens)]), verdict.accepted, again)


def log_probabilities(row: Logits, token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of `token` under logits [V], and the `top` likeliest tokens with theirs."""
    logits = row.astype(np.float64)
    logits -= logits.max()
    logs = logits - np.log(np.exp(logits).sum())
    best: Sequence[int] = np.argsort(-logs, kind="stable")[:top].tolist()
    return float(logs[token]), tuple((t, float(logs[t])) for t in best)


def _margin(row: Logits) -> float:
    second, first = np.partition(row, -2)[-2:]
    return float(first - second)
