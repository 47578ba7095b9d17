"""Drafts from n-gram counts of this text and of earlier requests together.

Every kind of context (see follow.py) that knows how the text's end went on votes for its followers, with
a weight for its kind times the follower's share; this text's own counts weigh more than the table's, and
followers that the text already holds weigh more than others. The weights express that longer contexts are
surer.

The table is bounded and forgets: when it outgrows its size, all counts are halved and single ones
dropped. It keeps counts of token sequences of earlier requests, so a private request neither adds to it
nor consults it.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from shardmill.decode.drafters.base import EMPTY, PLAIN, Draft, RequestInfo
from shardmill.decode.drafters.follow import LONGEST, NO_TOKEN, TAIL, FollowTable, context_keys, decayed
from shardmill.decode.drafters.follow_file import load_table, save_table

# Weight by kind, in the order of `context_keys`; kinds without a weight are not kept.
_OWN = (1.0, 3.0, 7.0, 2.0, 0.1, 0.5)
_TABLE = (0.4, 1.2, 2.6, 2.0, 0.04, 0.0)
_OWN_KINDS = (0, 1, 2, 3, 4, 5)
_TABLE_KINDS = (0, 1, 2, 3, 4)
_PLAIN_KINDS = (0, 1, 2, 3)  # those without a gap
_HELD = 3.0  # factor for followers that the text already holds
_DOUBT = 1.0  # votes cast for no token: few known contexts are less sure
_UNKNOWN = 0.05  # confidence in the most frequent token, where no context is known


class LearnedDrafter:
    """Votes of all contexts, of the text and of a table kept across requests.

    Args:
        size: (context, follower) pairs that the table may hold; one takes about 100 bytes.
    """

    name = "learned"
    _own: FollowTable
    _log: list[tuple[tuple[int, ...], int]]  # what `finish` adds to the table
    _before: dict[int, int]  # token -> what followed it the last time
    _held: dict[int, int]  # token -> occurrences in this text
    _tail: tuple[int, ...]

    def __init__(self, *, size: int = 2_000_000) -> None:
        self._size = size
        self._table = FollowTable()
        self.pairs = 0
        self._private = False
        self._restart()

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
        while len(tokens) < limit and self._held:
            last = tail[-1]
            previous = drafted.get(last, self._before.get(last, NO_TOKEN))
            keys = context_keys(tail, previous)
            token, sure = self._vote(keys, hasty=bool(tokens))
            tokens.append(token)
            confidence.append(sure)
            drafted[last] = token
            tail = (*tail[1:], token)
        return Draft(tuple(tokens), tuple(confidence)) if tokens else EMPTY

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """See `Drafter`."""
        for token in emitted:
            last = self._tail[-1]
            keys = context_keys(self._tail, self._before.get(last, NO_TOKEN))
            self._own.add(keys, token, _OWN_KINDS)
            self._log.append((keys, token))
            self._before[last] = token
            self._held[token] = self._held.get(token, 0) + 1
            self._tail = (*self._tail[1:], token)

    def finish(self) -> None:
        """Adds the request to the table, unless it is private."""
        if not self._private:
            self.pairs += sum(self._table.add(keys, token, _TABLE_KINDS) for keys, token in self._log)
            while self.pairs > self._size:
                self._table = decayed(self._table, 0.5, 1.0)
                self.pairs = len(self._table)
        self._restart()

    def save(self, path: Path) -> None:
        """Writes the table; it holds token sequences of the requests it learned from."""
        save_table(path, self._table)

    def load(self, path: Path) -> None:
        """Replaces the table by a saved one."""
        self._table = load_table(path)
        self.pairs = len(self._table)

    def _restart(self) -> None:
        self._own = FollowTable()
        self._log = []
        self._before = {}
        self._held = {}
        self._tail = (NO_TOKEN,) * TAIL

    def _vote(self, keys: Sequence[int], *, hasty: bool) -> tuple[int, float]:
        """The likeliest token and the share of the votes that it got.

        In haste, behind a draft, what would hardly change the outcome is not asked: contexts with gaps, and the
        table where the text itself knows the longest context.
        """
        votes: dict[int, float] = defaultdict(float)
        cast = self._own.votes(votes, _OWN, keys, _PLAIN_KINDS if hasty else _OWN_KINDS)
        if not self._private and not (hasty and keys[LONGEST] in self._own.kinds[LONGEST]):
            cast += self._table.votes(votes, _TABLE, keys, _PLAIN_KINDS if hasty else _TABLE_KINDS)
        if not votes:
            return max(self._held, key=self._held.__getitem__), _UNKNOWN
        best, most = NO_TOKEN, -1.0
        for token, score in votes.items():
            weighed = score * _HELD if token in self._held else score
            if weighed > most:
                best, most = token, weighed
        return best, votes[best] / (cast + _DOUBT)
