"""The two forms of an answer: a text completion and a chat message, whole or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.serve.logprobs import Alternative, TokenLogprob

Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The JSON form of a kind of answer.

    Attributes:
        prefix: prefix of the answer's id.
        whole_name, piece_name: the `object` of an answer and of a chunk.
        whole, piece: text -> the choice's content.
        opening: content of an extra first chunk, or None.
        logprobs: tokens -> the choice's `logprobs`.
    """

    prefix: str
    whole_name: str
    piece_name: str
    whole: Callable[[str], Json]
    piece: Callable[[str], Json]
    opening: Json | None
    logprobs: Callable[[Sequence[TokenLogprob]], Json]


def _text_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {
        "tokens": [row.token.text for row in tokens],
        "token_logprobs": [row.token.logprob for row in tokens],
        "top_logprobs": [{other.text: other.logprob for other in reversed(row.top)} for row in tokens],
        "text_offset": [row.offset for row in tokens],
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    rows = [_alternative(row.token) | {"top_logprobs": [_alternative(other) for other in row.top]} for row in tokens]
    return {"content": rows, "refusal": None}


def _alternative(token: Alternative) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


COMPLETION = Shape(
    prefix="cmpl-",
    whole_name="text_completion",
    piece_name="text_completion",
    whole=lambda text: {"text": text},
    piece=lambda text: {"text": text},
    opening=None,
    logprobs=_text_logprobs,
)
CHAT = Shape(
    prefix="chatcmpl-",
    whole_name="chat.completion",
    piece_name="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    piece=lambda text: {"delta": {"content": text} if text else {}},
    opening={"delta": {"role": "assistant", "content": ""}},
    logprobs=_chat_logprobs,
)
