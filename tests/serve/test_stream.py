"""A stream begins before its turn, stays alive while it waits, tells of a failure, and ends at once with its reader."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from drafted_decoding import DecodeError, create_drafter
from numpy.typing import NDArray
from patience import PATIENCE, wait_until
from starlette.types import Message

from shardmill.serve.model import Limits, Settings
from shardmill.serve.protocol import ClientGoneError
from shardmill.serve.stream import KEEPALIVE, send_chunk, while_connected

from .fake import VOCAB, Speaker, fake_model
from .running import Running, ask, running

OFTEN = Settings(port=0, limits=Limits(queue=1, keepalive_seconds=0.01))


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


def begun(server: Running, request: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream that has sent its status, two comments and nothing else."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    body = json.dumps({**request, "stream": True}).encode()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.getheader("content-type", "").startswith("text/event-stream")
    assert answer.read(2 * len(KEEPALIVE)) == 2 * KEEPALIVE
    return connection, answer


def test_a_stream_begins_before_its_prompt_is_run_and_is_kept_alive() -> None:
    """Proxies cut a connection that is silent for a minute, which a long prompt may take. Clients skip the comments."""
    engine = Speaker()
    with running(fake_model(engine), OFTEN) as server:
        expected = server.client().completions.create(**ask()).choices[0].text
        engine.hold()
        connection, answer = begun(server, ask())
        assert engine.reached.wait(PATIENCE)
        connection.close()
        answer.close()
        stream = server.client().completions.create(**ask(), stream=True)  # returns once the status is there
        engine.free.set()
        assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_a_stream_in_the_queue_is_kept_alive_and_a_full_queue_still_has_its_status() -> None:
    """Its client may leave at any time, which makes room."""
    engine = Speaker()
    with running(fake_model(engine), OFTEN) as server, ThreadPoolExecutor(1) as pool:
        engine.hold()
        first = pool.submit(server.post, ask())
        try:
            assert engine.reached.wait(PATIENCE)
            connection, answer = begun(server, ask(prompt="never run"))
            with pytest.raises(openai.RateLimitError):
                server.client().completions.create(**ask(), stream=True)
            connection.close()
            answer.close()
            wait_until(lambda: server.metric("shardmill_queue_length") == 0)
        finally:
            engine.free.set()
        assert first.result(PATIENCE)[0] == 200
        assert server.metric('shardmill_tokens_total{kind="generated"}') == 24


def test_tokens_without_text_do_not_silence_a_stream() -> None:
    """Text may be held back for as long as it might begin a stop string, and the engine may be slow."""
    engine = Speaker(slots=1024, delay=0.005)
    letter = str(fake_model().encode("x")[0])
    with running(fake_model(engine), OFTEN) as server:
        request = ask(max_tokens=100, logit_bias={letter: 100}, stop=["x" * 200])
        connection, answer = begun(server, request)
        events = answer.read().split(b"\n\n")
        connection.close()
    assert events[-2] == b"data: [DONE]"
    assert sum(b'"text": "x' in event for event in events) == 1 and KEEPALIVE.strip() in events


class Failing:
    """A grammar that breaks down after some tokens."""

    finished = False

    def __init__(self) -> None:
        self.left = 5

    def allowed(self) -> NDArray[np.bool_]:
        return np.ones(VOCAB, np.bool_)

    def advance(self, token: int) -> None:
        self.left -= 1
        if not self.left:
            raise DecodeError("grammar rejected: too complex")

    def valid_prefix(self, draft: tuple[int, ...]) -> int:
        return len(draft)

    def forced(self) -> tuple[int, ...]:
        return ()


def test_a_grammar_that_fails_in_mid_answer_is_told_in_the_stream_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error event in place of a second status; the session and the drafter of the next request are new ones."""
    made: list[str] = []

    def create(name: str, **settings: Any) -> Any:
        made.append(name)
        return create_drafter(name, **settings)

    monkeypatch.setattr("shardmill.serve.engine_worker.create_drafter", create)
    with running(fake_model()) as server:
        expected = server.client().completions.create(**ask()).choices[0].text
        with monkeypatch.context() as context:
            context.setattr("shardmill.serve.prepare._constraint", lambda *_: Failing())
            pieces: list[str] = []
            with pytest.raises(openai.APIError, match="grammar rejected: too complex") as told:
                for chunk in server.client().completions.create(**ask(), stream=True):
                    pieces.append(chunk.choices[0].text)
        assert not isinstance(told.value, openai.APIStatusError)
        assert pieces and expected.startswith("".join(pieces))
        made.clear()
        again = server.client().completions.create(**ask())
        assert again.choices[0].text == expected and made == ["ngram"]
        assert again.usage is not None and again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == 0
