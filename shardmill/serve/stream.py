"""Sends an answer as a stream of server-sent events, which ends when its client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from drafted_decoding import GenerationResult, LabelScores
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardmill.serve.engine_worker import Worker
from shardmill.serve.jobs import Item, Job, ending
from shardmill.serve.model import Limits
from shardmill.serve.protocol import ApiError, ClientGoneError, client_gone

log = logging.getLogger(__name__)
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEPALIVE = b": keepalive\n\n"  # a comment, which readers of server-sent events ignore
T = TypeVar("T")
Json = dict[str, Any]


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
    items = await job.take(whole=True)
    while ending(items) is None:
        items += await job.take(whole=True)
    return items


class Streamed(Protocol):
    """An answer that can be sent in chunks.

    Attributes:
        done: bytes at the end of the stream.
    """

    done: ClassVar[bytes]

    def opening(self, index: int) -> Iterator[Json]:
        """Yield the chunks before a choice's text."""

    def chunks(self, index: int, items: list[Item]) -> Iterator[Json]:
        """Yield the chunks for items of a choice's job; the last item may be the end."""

    def closing(self) -> Iterator[Json]:
        """Yield the chunks after all choices."""


class EventStream(Response):
    """An answer as a stream, one event per chunk, with `[DONE]` or an error at the end.

    The status is sent before the job's turn, and a comment whenever nothing was sent for `keepalive_seconds`, because
    proxies cut silent connections. The jobs run at their own speed. They are cancelled when the client leaves, or reads
    nothing for `stall_seconds`.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Streamed, jobs: Sequence[Job], worker: Worker, limits: Limits) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._answer, self._jobs, self._worker = answer, jobs, worker
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
            for job in self._jobs:
                self._worker.cancel(job, client_gone())

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._pieces():
            await send_chunk(send, data, self._stall)
        await send_chunk(send, b"", self._stall, more=False)

    async def _pieces(self) -> AsyncIterator[bytes]:
        now = asyncio.get_running_loop().time
        for index, job in enumerate(self._jobs):
            yield _events(self._answer.opening(index))
            due = now() + self._keepalive
            end: GenerationResult | LabelScores | ApiError | None = None
            while end is None:
                try:
                    async with asyncio.timeout_at(due):
                        items = await job.take()
                except TimeoutError:
                    data = KEEPALIVE
                else:
                    data, end = _events(self._answer.chunks(index, items)), ending(items)
                if isinstance(end, GenerationResult) and job is self._jobs[-1]:
                    data += _events(self._answer.closing()) + self._answer.done
                if data:
                    yield data
                    due = now() + self._keepalive
            if isinstance(end, ApiError):
                return


def _events(chunks: Iterable[Json]) -> bytes:
    return b"".join(_event(chunk) for chunk in chunks)


def _event(chunk: Json) -> bytes:
    """Return a chunk as an event; a chunk with a type, as in the Responses API, is named by it."""
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return f"{name}data: {json.dumps(chunk)}\n\n".encode()
