"""Prompt-lookup decoding: drafts the continuation of the last earlier occurrence of the text's end.

The longest known suffix wins, and among its earlier occurrences the most recent. Each drafted token is looked up
separately, as if the drafts before it were text. Occurrences are indexed as the text grows, so a proposal costs a few
look-ups.
"""

from collections.abc import Sequence

from shardmill.decode.drafters.base import EMPTY, PLAIN, Draft, RequestInfo
from shardmill.decode.engine import DecodeError

_CONFIDENCE = (0.2, 0.4, 0.55, 0.65)  # by length of the match; the width controller measures the true rates


class NgramDrafter:
    """A drafter by the longest known suffix of `shortest` to `longest` tokens, and its most recent occurrence."""

    name = "ngram"

    def __init__(self, *, longest: int = 4, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise DecodeError(f"n-grams of {shortest} to {longest} tokens: use 1 <= shortest <= longest")
        self._orders = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """See `Drafter`."""
        self._text = []
        self._next = {}
        self._extend(prompt)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`."""
        tail = list(context[-self._orders[0] :])
        tokens: list[int] = []
        confidence: list[float] = []
        while len(tokens) < limit and (token := self._lookup(tail)) is not None:
            tokens.append(token[0])
            confidence.append(_CONFIDENCE[min(token[1], len(_CONFIDENCE)) - 1])
            tail.append(token[0])
        return Draft(tuple(tokens), tuple(confidence)) if tokens else EMPTY

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """See `Drafter`."""
        self._extend(emitted)

    def finish(self) -> None:
        """See `Drafter`."""

    def _extend(self, tokens: Sequence[int]) -> None:
        longest, shortest = self._orders[0], self._orders[-1]
        for token in tokens:
            tail = tuple(self._text[-longest:])
            for order in range(shortest, len(tail) + 1):
                self._next[tail[-order:]] = token
            self._text.append(token)

    def _lookup(self, tail: Sequence[int]) -> tuple[int, int] | None:
        """Return the follower of the longest known suffix of `tail`, and that suffix's length."""
        for order in self._orders:
            found = self._next.get(tuple(tail[-order:])) if order <= len(tail) else None
            if found is not None:
                return found, order
        return None
