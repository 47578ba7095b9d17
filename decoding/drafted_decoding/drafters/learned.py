"""Drafts from n-gram counts of this text and of earlier requests together.

Each kind of context (see follow.py) that has occurred before votes for its followers; the weights of the votes were
fitted on other texts (see lab/fit_evidence.py).

The table is bounded: when it is full, each request makes room for its own entries by forgetting the contexts that were
learned or halved longest ago. It contains counts of token sequences of earlier requests, so a private request neither
adds to it nor reads it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

from drafted_decoding.drafters.base import EMPTY, PLAIN, Draft, RequestInfo
from drafted_decoding.drafters.follow import (
    KINDS,
    LONGEST,
    NO_TOKEN,
    TAIL,
    FollowTable,
    Found,
    Numbering,
    Weights,
    context_keys,
    load_table,
    save_table,
)

FILE = Path(__file__).with_name("evidence.json")
OFTEN = 5  # occurrences in the text beyond which the bonus no longer grows


@dataclass(frozen=True)
class FollowerCounts:
    """Fitted weights.

    Attributes:
        own, table: weights by kind of context, for this text and for earlier texts; None for kinds that are not kept.
            The first three, the contexts without a gap, are always kept: they determine the situation.
        own_trust, table_trust: by situation (see `situation`), one trust for each kept kind.
        held: bonus of a token that occurs 0, 1, ... `OFTEN` times in the text.
        none: exponential of the score of "no candidate".
    """

    own: tuple[Weights | None, ...]
    table: tuple[Weights | None, ...]
    own_trust: tuple[tuple[float, ...], ...]
    table_trust: tuple[tuple[float, ...], ...]
    held: tuple[float, ...]
    none: float


@cache
def fitted() -> FollowerCounts:
    """Read the fitted weights."""
    return parse_weights(json.loads(FILE.read_text(encoding="utf-8")))


def parse_weights(content: Mapping[str, Any]) -> FollowerCounts:
    """Build the weights from the content of their file."""
    by_count, present = content["held"]
    return FollowerCounts(
        own=tuple(_weights(row) for row in content["own"]),
        table=tuple(_weights(row) for row in content["table"]),
        own_trust=tuple(tuple(row) for row in content["own_trust"]),
        table_trust=tuple(tuple(row) for row in content["table_trust"]),
        held=(0.0, *(by_count * n / OFTEN + present for n in range(1, OFTEN + 1))),
        none=exp(content["none"]),
    )


def situation(text: Found, table: Found) -> int:
    """Return the index of the longest contexts, up to three tokens each, that the text and the table know."""
    return 4 * _longest(text) + _longest(table)


def _longest(by_kind: Found) -> int:
    for length in (3, 2, 1):
        if by_kind[length - 1] is not None:
            return length
    return 0


def _weights(row: Sequence[float] | None) -> Weights | None:
    return None if row is None else (row[0], row[1], row[2])


_HOPELESS = 0.005  # probability of a whole draft below which it is not extended
_NOTHING: Found = (None,) * KINDS
_UNKNOWN = 0.03  # confidence in the most frequent token, if no context is known


class LearnedDrafter:
    """A drafter that proposes the likeliest token by all contexts, of the text and of a table kept across requests.

    Args:
        size: (context, follower) pairs that the table may contain; one takes about 120 bytes.
        evidence: the weights of contexts; by default the fitted ones.
    """

    name = "learned"
    _own: FollowTable
    _log: list[tuple[tuple[int, ...], int]]  # the entries that `finish` adds to the table
    _before: dict[int, int]  # token -> its last follower
    _held: dict[int, int]  # token -> occurrences in this text
    _usual: int  # the most frequent token of this text
    _bonus: dict[int, float]  # token -> bonus for its occurrences
    _tail: tuple[int, ...]

    def __init__(self, *, size: int = 2_000_000, evidence: FollowerCounts | None = None) -> None:
        self._size = size
        self._evidence = evidence or fitted()
        self._table = FollowTable(self._evidence.table)
        self._private = False
        self._restart()

    @property
    def pairs(self) -> int:
        """Return how many (context, follower) pairs the table contains."""
        return self._table.pairs

    def sibling(self) -> LearnedDrafter:
        """Return a drafter for a request beside this one's, with the same table."""
        made = LearnedDrafter(size=self._size, evidence=self._evidence)
        made._table = self._table
        return made

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """See `Drafter`."""
        self._private = info.private
        self._restart()
        self.observe(prompt, 0)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`."""
        tail = self._tail
        drafted: dict[int, int] = {}
        tokens: list[int] = []
        confidence: list[float] = []
        alive = 1.0
        while len(tokens) < limit and self._held and alive > _HOPELESS:
            last = tail[-1]
            previous = drafted.get(last, self._before.get(last, NO_TOKEN))
            keys = context_keys(tail, previous)
            token, sure = self._likeliest(keys, hasty=bool(tokens))
            tokens.append(token)
            confidence.append(sure)
            alive *= sure
            drafted[last] = token
            tail = (*tail[1:], token)
        return Draft(tuple(tokens), tuple(confidence)) if tokens else EMPTY

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """See `Drafter`."""
        bonus = self._evidence.held
        for token in emitted:
            last = self._tail[-1]
            keys = context_keys(self._tail, self._before.get(last, NO_TOKEN))
            self._own.add(keys, token)
            self._log.append((keys, token))
            self._before[last] = token
            self._held[token] = count = self._held.get(token, 0) + 1
            self._bonus[token] = bonus[count if count < OFTEN else OFTEN]
            if count >= self._held.get(self._usual, 0):
                self._usual = token
            self._tail = (*self._tail[1:], token)

    def finish(self) -> None:
        """Add the request to the table, unless it is private."""
        if not self._private:
            self._table.pairs += sum(self._table.add(keys, token) for keys, token in self._log)
            self._table.pairs -= self._table.forget(self.pairs - self._size)
        self._restart()

    def save(self, path: Path, numbering: Numbering) -> None:
        """Write the table. It contains token sequences of earlier requests.

        Raises:
            DecodeError: the file can't be written.
        """
        save_table(path, self._table, numbering)

    def load(self, path: Path, numbering: Numbering) -> None:
        """Replace the table by a saved one.

        Raises:
            DecodeError: the file contains no table, or another model's.
        """
        self._table = load_table(path, FollowTable(self._evidence.table), numbering)
        self._table.pairs = len(self._table)

    def _restart(self) -> None:
        self._own = FollowTable(self._evidence.own)
        self._log = []
        self._before = {}
        self._held = {}
        self._bonus = {}
        self._usual = NO_TOKEN
        self._tail = (NO_TOKEN,) * TAIL

    def _known(self, keys: Sequence[int], *, hasty: bool) -> tuple[Found, Found]:
        """Look up the followers of the contexts in this text and, in the table, in earlier ones.

        In haste, for tokens after the first of a draft, the table is skipped if the text itself knows the longest
        context: it would hardly change the outcome.
        """
        text = self._own.find(keys)
        silent = self._private or (hasty and text[LONGEST] is not None)
        return text, _NOTHING if silent else self._table.find(keys)

    def _likeliest(self, keys: Sequence[int], *, hasty: bool) -> tuple[int, float]:
        """Return the likeliest token and its probability."""
        evidence = self._evidence
        text, table = self._known(keys, hasty=hasty)
        where = situation(text, table)
        scores: defaultdict[int, float] = defaultdict(float)
        self._own.weigh(scores, text, evidence.own_trust[where])
        self._table.weigh(scores, table, evidence.table_trust[where])
        if not scores:
            return self._usual, _UNKNOWN
        bonus = self._bonus.get
        points = [score + bonus(token, 0.0) for token, score in scores.items()]
        most = max(points)
        return list(scores)[points.index(most)], exp(most) / (evidence.none + sum(map(exp, points)))
