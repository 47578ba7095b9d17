"""Drafters that need nothing but the text: they propose what followed an earlier occurrence of the text's end.

`NgramDrafter` is prompt-lookup decoding: the longest known suffix of up to four tokens wins, and among its earlier
occurrences the most recent. Each drafted token is looked up separately, as if the drafts before it were text.

`SuffixDrafter` has a suffix automaton of the text, so its suffixes have any length. The automaton grows with the text,
amortised O(1) per token. Each state is a context; it counts its followers and proposes the most frequent one, and among
equals the latest. If the text's end is entirely new, the most frequent token is proposed. Blumer et al., "The smallest
automaton recognizing the subwords of a text", 1985; used for drafting by Hu et al., "SAM Decoding", 2024.
"""

from collections.abc import Sequence

from drafted_decoding.drafters.base import EMPTY, PLAIN, Draft, RequestInfo
from drafted_decoding.engine import DecodeError

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
            follower = self._next.get(tuple(tail[-order:])) if order <= len(tail) else None
            if follower is not None:
                return follower, order
        return None


_COUNTED = 6  # contexts, longest first, in which a token updates the counts; this bounds the cost of a token


class SuffixAutomaton:
    """The contexts of a text and their followers. State 0 is the empty context."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.best: list[int] = [-1]  # most frequent continuation
        self._counts: list[dict[int, int]] = [{}]
        self._last = 0

    @property
    def match(self) -> int:
        """Return the state of the longest suffix of the text that also occurred earlier."""
        return max(self.link[self._last], 0)

    def share(self, state: int) -> float:
        """Return the share of the state's best continuation among its continuations; an uncounted one counts once."""
        counts, best = self._counts[state], self.best[state]
        total = sum(counts.values()) + len(self.next[state]) - len(counts)
        return counts.get(best, 1) / total

    def extend(self, token: int) -> None:
        """Append `token` to the text."""
        self._count(token)
        state = self._new_state(self.length[self._last] + 1, {}, -1)
        p = self._last
        while p >= 0 and token not in self.next[p]:
            self._connect(p, token, state)
            p = self.link[p]
        self.link[state] = self._context_for(p, token)
        self._last = state

    def _context_for(self, p: int, token: int) -> int:
        """Return the state of the longest known context that ends in `token`; split it off if necessary."""
        if p < 0:
            return 0
        q = self.next[p][token]
        if self.length[q] == self.length[p] + 1:
            return q
        clone = self._new_state(self.length[p] + 1, dict(self.next[q]), self.best[q])
        self._counts[clone] = dict(self._counts[q])
        self.link[clone] = self.link[q]
        self.link[q] = clone
        while p >= 0 and self.next[p].get(token) == q:
            self.next[p][token] = clone
            p = self.link[p]
        return clone

    def _new_state(self, length: int, follow: dict[int, int], best: int) -> int:
        self.next.append(follow)
        self.link.append(-1)
        self.length.append(length)
        self.best.append(best)
        self._counts.append({})
        return len(self.next) - 1

    def _connect(self, state: int, token: int, target: int) -> None:
        self.next[state][token] = target
        if self._counts[state].get(self.best[state], 1) <= 1:
            self.best[state] = token

    def _count(self, token: int) -> None:
        state = self.link[self._last]
        for _ in range(_COUNTED):
            if state <= 0:
                break
            self._count_in(state, token)
            state = self.link[state]
        self._count_in(0, token)

    def _count_in(self, state: int, token: int) -> None:
        if token not in self.next[state]:
            return  # its first time: the transition itself stands for it
        counts = self._counts[state]
        counts[token] = counts.get(token, 1) + 1
        if counts[token] >= counts.get(self.best[state], 1):
            self.best[state] = token


class SuffixDrafter:
    """A drafter by the longest match and its most frequent continuation."""

    name = "suffix"

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """See `Drafter`."""
        self._automaton = SuffixAutomaton()
        self.observe(prompt, 0)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`."""
        automaton = self._automaton
        state = automaton.match
        length = automaton.length[state]  # of the match; a state's own length is the length of its longest context
        tokens: list[int] = []
        confidence: list[float] = []
        while len(tokens) < limit:
            while state > 0 and automaton.best[state] < 0:  # a context that occurred only at the end of the text
                state = automaton.link[state]
                length = automaton.length[state]
            if automaton.best[state] < 0:
                break
            tokens.append(automaton.best[state])
            confidence.append(_confidence(length, automaton.share(state)))
            state = automaton.next[state][tokens[-1]]
            length += 1
        return Draft(tuple(tokens), tuple(confidence)) if tokens else EMPTY

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """See `Drafter`."""
        for token in emitted:
            self._automaton.extend(token)

    def finish(self) -> None:
        """See `Drafter`."""


def _confidence(length: int, share: float) -> float:
    return share * length / (length + 1.5)
