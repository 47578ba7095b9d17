"""A stream whose reader leaves ends at once, whatever else happens in the same turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.types import Message

from shardmill.serve.errors import ClientGoneError
from shardmill.serve.stream import send_chunk, while_connected

PATIENCE = 5  # seconds


def run(work: Coroutine[Any, Any, None]) -> None:
    """Runs to the end, or fails after a while."""
    asyncio.run(asyncio.wait_for(work, PATIENCE))


@pytest.mark.parametrize("turns", range(1, 10))
def test_a_reader_that_leaves_while_a_chunk_is_being_sent(turns: int) -> None:
    """The chunk's end may come with the departure: a cancellation lost there would let the answer run on unread."""

    async def scenario() -> None:
        gone, chunks = asyncio.Event(), 0

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal chunks
            chunks += 1
            gone.set()
            for _ in range(turns):  # of the event loop
                await asyncio.sleep(0)

        async def answer() -> None:
            for _ in range(100):
                await send_chunk(send, b"a chunk", stall=60)

        with pytest.raises(ClientGoneError):
            await while_connected(receive, answer())
        assert chunks < 20

    run(scenario())


def test_a_reader_that_takes_nothing_is_given_up() -> None:
    """`stall` seconds without a byte taken end the stream."""

    async def scenario() -> None:
        async def send(message: Message) -> None:
            await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            await send_chunk(send, b"a chunk", stall=0.01)

    run(scenario())
