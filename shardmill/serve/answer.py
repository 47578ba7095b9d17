"""Turns tokens into the JSON of an answer, whole or chunk by chunk."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from shardmill.decode import FinishReason, TokenEvent
from shardmill.serve.errors import ApiError
from shardmill.serve.job import Done, Item
from shardmill.serve.logprobs import LogprobLog, TokenLogprob
from shardmill.serve.model import Model
from shardmill.serve.schema import ChatRequest, CompletionRequest
from shardmill.serve.shapes import CHAT, COMPLETION, Json

FINISH: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class Answer:
    """One answer in progress, built from a job's items."""

    def __init__(self, request: CompletionRequest | ChatRequest, model: Model) -> None:
        self._request = request
        self._shape = CHAT if isinstance(request, ChatRequest) else COMPLETION
        self._log = LogprobLog(model.vocabulary, model.eos) if request.top is not None else None
        self._length = 0
        self._head = {
            "id": self._shape.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint or None,
        }

    def whole(self, items: list[Item], done: Done) -> Json:
        """Return the answer as one object, from all items of a job."""
        text, rows = self._digest(items)
        logprobs = None if self._log is None else self._shape.logprobs(rows)
        choice = self._choice(self._shape.whole(text), logprobs, FINISH[done.result.finish_reason])
        return self._object(self._shape.whole_name, [choice]) | {"usage": usage(done)} | self._figures(done)

    def opening(self) -> Iterator[Json]:
        """Yield the chunks before the text."""
        if self._shape.opening is not None:
            yield self._chunk([self._choice(self._shape.opening, None, None)])

    def chunks(self, items: list[Item]) -> Iterator[Json]:
        """Yield the chunks for items of a job; the last item may be the end."""
        text, rows = self._digest(items)
        if text or rows:
            logprobs = self._shape.logprobs(rows) if rows else None
            yield self._chunk([self._choice(self._shape.piece(text), logprobs, None)])
        done = items[-1]
        if isinstance(done, ApiError):
            yield done.content()
        if isinstance(done, Done):
            finish = FINISH[done.result.finish_reason]
            yield self._chunk([self._choice(self._shape.piece(""), None, finish)]) | self._figures(done)
            if self._request.stream_options is not None and self._request.stream_options.include_usage:
                yield self._chunk([]) | {"usage": usage(done)}

    def _digest(self, items: list[Item]) -> tuple[str, list[TokenLogprob]]:
        """Return the text that became final, and its log-probabilities."""
        text = ""
        for item in items:
            if isinstance(item, TokenEvent):
                text += item.text
                if self._log is not None:
                    self._log.push(item)
            elif isinstance(item, Done):
                text += item.result.tail
        self._length += len(text)
        if self._log is None:
            return text, []
        done = items[-1]
        cut = not isinstance(done, Done) or done.result.finish_reason == "stop"
        return text, self._log.release(self._length) if cut else self._log.release_all()

    def _choice(self, content: Json, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, choices: list[Json]) -> Json:
        return self._object(self._shape.piece_name, choices)

    def _object(self, name: str, choices: list[Json]) -> Json:
        return {**self._head, "object": name, "choices": choices}

    def _figures(self, done: Done) -> Json:
        """Return the requested figures of an answer and, even if not requested, a mark on lossy answers."""
        asked = self._request.shardmill
        content = figures(done) if asked.figures else {}
        if asked.accept_top_p is not None:
            content["lossy"] = True
        return {"shardmill": content} if content else {}


def usage(done: Done) -> Json:
    """Return OpenAI's `usage`; an end-of-text token counts as generated."""
    prompt, generated = done.result.prompt_tokens, len(done.result.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": done.result.reused_tokens},
    }


def figures(done: Done) -> dict[str, Any]:
    """Return the figures of an answer, for clients that send `"shardmill": {"figures": true}`."""
    result = done.result
    return {
        "finish_reason": result.finish_reason,
        "tokens": list(result.tokens),
        "passes": result.passes,
        "drafted": list(result.drafted),
        "accepted": list(result.accepted),
        "pass_seconds": list(result.pass_seconds),
        "verified_again": result.verified_again,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "drafter_seconds": result.drafter_seconds,
    }
