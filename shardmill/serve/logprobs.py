"""How likely the model found the tokens of an answer and of its prompt, as OpenAI's API tells it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from drafted_decoding import PromptLogprob, TokenEvent

from shardmill.serve.model import Vocabulary

LEAST = -9999.0  # OpenAI's value for tokens that are all but impossible
Json = dict[str, Any]


@dataclass(frozen=True)
class TokenLogprob:
    """An emitted token.

    Attributes:
        token: its text, its bytes and the model's log-probability for it, before temperature and filters, as in a chat.
        top: the likeliest tokens in its place.
        offset: characters of the text before it.
        end: offset of the end of its text, including a partial character or stop string.
    """

    token: Json
    top: list[Json]
    offset: int
    end: int


class LogprobLog:
    """A buffer that keeps tokens until their text is final.

    Args:
        vocabulary: the texts of tokens.
        silent: tokens that are left out.
        before: characters of the text before the first token's.
    """

    def __init__(self, vocabulary: Vocabulary, silent: Sequence[int], before: int = 0) -> None:
        self._vocabulary = vocabulary
        self._silent, self._before = silent, before
        self._held: list[TokenLogprob] = []

    def push(self, event: TokenEvent) -> None:
        """Record a token, unless it is left out."""
        if event.logprob is None or event.token in self._silent:
            return
        start, end = event.start + self._before, event.end + self._before
        for i in range(len(self._held) - 1, -1, -1):
            if self._held[i].end <= end:
                break
            self._held[i] = replace(self._held[i], end=end)  # the tokens were parts of one character
        self._held.append(self._row(event, event.logprob, len(event.top), start, end))

    def echoed(self, prompt: Sequence[PromptLogprob], top: int) -> list[TokenLogprob]:
        """Return the tokens of a prompt that is the beginning of the text, with the `top` likeliest in their places.

        What the tokenizer puts before a text, such as a beginning-of-text token, takes no characters of it.
        """
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        ends = [*accumulate(len(decode(self._vocabulary.bytes(one.token))) for one in prompt)]
        places = pairwise([0, *(max(0, end - max(0, ends[-1] - self._before)) for end in ends)])
        return [self._row(one, one.logprob, top, start, end) for one, (start, end) in zip(prompt, places, strict=True)]

    def release(self, length: float) -> list[TokenLogprob]:
        """Release the tokens of the answer's first `length` characters, which are final."""
        count = sum(1 for token in self._held if token.offset < length and token.end <= length)  # neither ever falls
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _row(
        self, event: TokenEvent | PromptLogprob, logprob: float | None, top: int, start: int, end: int
    ) -> TokenLogprob:
        others = [self._alternative(token, other) for token, other in event.top[:top]]
        return TokenLogprob(self._alternative(event.token, logprob), others, start, end)

    def _alternative(self, token: int, logprob: float | None) -> Json:
        finite = None if logprob is None else max(logprob, LEAST)  # JSON has no infinities
        text, content = self._vocabulary.text(token), self._vocabulary.bytes(token)
        return {"token": text, "logprob": finite, "bytes": list(content)}


def text_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    """Return them as a completion tells them: lists in the tokens' order."""
    return {
        "tokens": [row.token["token"] for row in tokens],
        "token_logprobs": [row.token["logprob"] for row in tokens],
        "top_logprobs": [
            None if row.token["logprob"] is None else {one["token"]: one["logprob"] for one in reversed(row.top)}
            for row in tokens
        ],
        "text_offset": [row.offset for row in tokens],
    }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    """Return them as a chat tells them: an object for each token."""
    return {"content": [row.token | {"top_logprobs": row.top} for row in tokens], "refusal": None}
