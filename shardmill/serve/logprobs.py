"""Log-probabilities of an answer: a token's are released when all of its text is final.

So the log-probabilities of tokens that contain any part of a stop string are never sent, even if it begins inside a
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmill.decode import TokenEvent
from shardmill.serve.vocabulary import Vocabulary

LEAST = -9999.0  # OpenAI's value for tokens that are all but impossible


@dataclass(frozen=True)
class Alternative:
    """A token and the model's log-probability for it, before temperature and filters."""

    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """An emitted token.

    Attributes:
        token: the token itself.
        top: the likeliest tokens in its place.
        offset: characters of the answer before it.
        end: offset of the end of its text, including a partial character or stop string.
    """

    token: Alternative
    top: tuple[Alternative, ...]
    offset: int
    end: int


class LogprobLog:
    """A buffer that keeps tokens until their text is final."""

    def __init__(self, vocabulary: Vocabulary, eos: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._eos = eos
        self._held: list[TokenLogprob] = []

    def push(self, event: TokenEvent) -> None:
        """Record a token, unless it only ends the text."""
        if event.logprob is None or event.token in self._eos:
            return
        top = tuple(self._alternative(token, logprob) for token, logprob in event.top)
        token = self._alternative(event.token, event.logprob)
        for i in range(len(self._held) - 1, -1, -1):
            if self._held[i].end <= event.end:
                break
            self._held[i] = replace(self._held[i], end=event.end)  # the tokens were parts of one character
        self._held.append(TokenLogprob(token, top, event.start, event.end))

    def release(self, length: int) -> list[TokenLogprob]:
        """Release the tokens of the answer's first `length` characters, which are final."""
        count = sum(1 for held in self._held if held.offset < length and held.end <= length)  # neither ever falls
        out, self._held = self._held[:count], self._held[count:]
        return out

    def release_all(self) -> list[TokenLogprob]:
        """Release all remaining tokens, at the end of an answer that no stop string cut."""
        out, self._held = self._held, []
        return out

    def _alternative(self, token: int, logprob: float) -> Alternative:
        finite = logprob if logprob > LEAST else LEAST  # JSON has no infinities
        return Alternative(self._vocabulary.text(token), self._vocabulary.bytes(token), finite)
