"""Turns tokens into an answer: one JSON object, or a stream of server-sent events that ends when its client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardmill.decode import FinishReason, GenerationResult, TokenEvent
from shardmill.serve.engine_worker import Item, Job, Worker, ending
from shardmill.serve.model import Limits, Model, Vocabulary
from shardmill.serve.protocol import ApiError, ChatRequest, ClientGoneError, CompletionRequest, client_gone

LEAST = -9999.0  # OpenAI's value for tokens that are all but impossible
Json = dict[str, Any]


@dataclass(frozen=True)
class TokenLogprob:
    """An emitted token.

    Attributes:
        token: its text, its bytes and the model's log-probability for it, before temperature and filters, as in a chat.
        top: the likeliest tokens in its place.
        offset: characters of the answer before it.
        end: offset of the end of its text, including a partial character or stop string.
    """

    token: Json
    top: list[Json]
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
        top = [self._alternative(token, logprob) for token, logprob in event.top]
        token = self._alternative(event.token, event.logprob)
        for i in range(len(self._held) - 1, -1, -1):
            if self._held[i].end <= event.end:
                break
            self._held[i] = replace(self._held[i], end=event.end)  # the tokens were parts of one character
        self._held.append(TokenLogprob(token, top, event.start, event.end))

    def release(self, length: float) -> list[TokenLogprob]:
        """Release the tokens of the answer's first `length` characters, which are final."""
        count = sum(1 for held in self._held if held.offset < length and held.end <= length)  # neither ever falls
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _alternative(self, token: int, logprob: float) -> Json:
        finite = logprob if logprob > LEAST else LEAST  # JSON has no infinities
        text, own = self._vocabulary.text(token), self._vocabulary.bytes(token)
        return {"token": text, "logprob": finite, "bytes": list(own)}


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
        "tokens": [row.token["token"] for row in tokens],
        "token_logprobs": [row.token["logprob"] for row in tokens],
        "top_logprobs": [{other["token"]: other["logprob"] for other in reversed(row.top)} for row in tokens],
        "text_offset": [row.offset for row in tokens],
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {"content": [row.token | {"top_logprobs": row.top} for row in tokens], "refusal": None}


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

    def whole(self, items: list[Item], done: GenerationResult) -> Json:
        """Return the answer as one object, from all items of a job."""
        text, rows = self._digest(items)
        logprobs = None if self._log is None else self._shape.logprobs(rows)
        choice = self._choice(self._shape.whole(text), logprobs, FINISH[done.finish_reason])
        return self._object(self._shape.whole_name, [choice]) | {"usage": _usage(done)} | self._figures(done)

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
        if isinstance(done, GenerationResult):
            finish = FINISH[done.finish_reason]
            yield self._chunk([self._choice(self._shape.piece(""), None, finish)]) | self._figures(done)
            if self._request.stream_options is not None and self._request.stream_options.include_usage:
                yield self._chunk([]) | {"usage": _usage(done)}

    def _digest(self, items: list[Item]) -> tuple[str, list[TokenLogprob]]:
        """Return the text that became final, and its log-probabilities."""
        text = ""
        for item in items:
            if isinstance(item, TokenEvent):
                text += item.text
                if self._log is not None:
                    self._log.push(item)
            elif isinstance(item, GenerationResult):
                text += item.tail
        self._length += len(text)
        if self._log is None:
            return text, []
        done = items[-1]
        cut = not isinstance(done, GenerationResult) or done.finish_reason == "stop"
        return text, self._log.release(self._length if cut else math.inf)

    def _choice(self, content: Json, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, choices: list[Json]) -> Json:
        return self._object(self._shape.piece_name, choices)

    def _object(self, name: str, choices: list[Json]) -> Json:
        return {**self._head, "object": name, "choices": choices}

    def _figures(self, done: GenerationResult) -> Json:
        """Return the requested figures of an answer and, even if not requested, a mark on lossy answers."""
        asked = self._request.shardmill
        content = _figures(done) if asked.figures else {}
        if asked.accept_top_p is not None:
            content["lossy"] = True
        return {"shardmill": content} if content else {}


def _usage(done: GenerationResult) -> Json:
    """Return OpenAI's `usage`; an end-of-text token counts as generated."""
    prompt, generated = done.prompt_tokens, len(done.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": done.reused_tokens},
    }


def _figures(result: GenerationResult) -> Json:
    """Return the figures of an answer, for clients that send `"shardmill": {"figures": true}`."""
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


log = logging.getLogger(__name__)
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEPALIVE = b": keepalive\n\n"  # a comment, which readers of server-sent events ignore
T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Wait for `work` and return its result.

    Raises:
        ClientGoneError: the client left first; `work` is cancelled.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError("the client closed the connection")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_chunk(send: Send, body: bytes, stall: float, *, more: bool = True) -> None:
    """Send a piece of an answer.

    `asyncio.wait_for` is not enough: up to Python 3.11 it loses a cancellation that arrives together with the result,
    and the answer would run on unread.

    Raises:
        TimeoutError: the client read nothing for `stall` seconds.
    """
    async with asyncio.timeout(stall):
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def take_all(job: Job) -> list[Item]:
    """Take a job's items until it ends, and return them."""
    items = await job.take()
    while ending(items) is None:
        items += await job.take()
    return items


class EventStream(Response):
    """An answer as a stream, one event per chunk, with `[DONE]` or an error at the end.

    The status is sent before the job's turn, and a comment whenever nothing was sent for `keepalive_seconds`, because
    proxies cut silent connections. The job runs at its own speed. It is cancelled when the client leaves, or reads
    nothing for `stall_seconds`.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, job: Job, worker: Worker, limits: Limits) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._answer, self._job, self._worker = answer, job, worker
        self._stall, self._keepalive = limits.stall_seconds, limits.keepalive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            await while_connected(receive, self._send(send))
        except ClientGoneError:
            pass
        except TimeoutError:
            log.warning("a client read nothing for %g s: its stream is closed", self._stall)
        finally:
            self._worker.cancel(self._job, client_gone())

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._pieces():
            await send_chunk(send, data, self._stall)
        await send_chunk(send, b"", self._stall, more=False)

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield _events(self._answer.opening())
        now = asyncio.get_running_loop().time
        due = now() + self._keepalive
        end: GenerationResult | ApiError | None = None
        while end is None:
            try:
                async with asyncio.timeout_at(due):
                    items = await self._job.take()
            except TimeoutError:
                data = KEEPALIVE
            else:
                data, end = _events(self._answer.chunks(items)), ending(items)
            if isinstance(end, GenerationResult):
                data += b"data: [DONE]\n\n"
            if data:
                yield data
                due = now() + self._keepalive


def _events(chunks: Iterable[Json]) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
