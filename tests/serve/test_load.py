"""Many clients, slow ones, and ones that leave: nobody's answer changes and nobody waits for another's reading."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from drafted_decoding.drafters import BY_ITSELF
from patience import PATIENCE, wait_until

from shardmill.serve.model import Limits, Settings

from .fake import END, NAME, Speaker, fake_model
from .running import Running, ask, running

CLIENTS = 64
WORDS = ("fox", "hen", "owl", "東京", "a long tale of many words about")


def one_of_many(i: int) -> dict[str, Any]:
    """Requests of different lengths, drafters and temperatures, some sharing beginnings."""
    drafter = BY_ITSELF[i % len(BY_ITSELF)]
    return ask(
        prompt=f"Tell me about the {WORDS[i % 5]} {i // 10}",
        max_tokens=8 + i % 17,
        temperature=0.9 if i % 3 else 0,
        seed=i,
        logprobs=1 if i % 4 == 0 else None,
        extra_body={"shardmill": {"drafter": drafter, "private": i % 2 == 0}},
    )


def text_of(server: Running, i: int, stream: bool) -> str:
    """One client's answer."""
    with server.client() as client:
        if not stream:
            return client.completions.create(**one_of_many(i)).choices[0].text
        return "".join(c.choices[0].text for c in client.completions.create(**one_of_many(i), stream=True))


@pytest.mark.thorough
def test_64_clients_at_once_get_the_answers_they_get_alone() -> None:
    """Half of them stream. None is refused, and afterwards nothing is left over."""
    with running(fake_model()) as server:
        with ThreadPoolExecutor(CLIENTS) as pool:
            together = list(pool.map(lambda i: text_of(server, i, stream=i % 2 == 0), range(CLIENTS)))
        assert server.metric("shardmill_queue_length") == server.metric("shardmill_running") == 0
        assert server.metric('shardmill_requests_total{endpoint="/v1/completions",status="200"}') == CLIENTS
    with running(fake_model()) as server:
        assert [text_of(server, i, stream=False) for i in range(CLIENTS)] == together
    assert len(set(together)) > CLIENTS / 2


def test_a_full_queue_is_a_429_and_then_all_are_served() -> None:
    """Exactly one runs and `queue` wait; the refusal says when to come back."""
    engine = Speaker()
    with running(fake_model(engine), Settings(port=0, limits=Limits(queue=2))) as server:
        engine.hold()
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(server.post, ask())]
            assert engine.reached.wait(PATIENCE)
            answers += [pool.submit(server.post, ask()) for _ in range(2)]
            wait_until(lambda: server.metric("shardmill_queue_length") == 2)
            with pytest.raises(openai.RateLimitError) as caught:
                server.client().completions.create(**ask())
            engine.free.set()
            assert [answer.result(PATIENCE)[0] for answer in answers] == [200, 200, 200]
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert caught.value.code == "queue_full"
        assert server.metric('shardmill_requests_total{endpoint="/v1/completions",status="429"}') == 1


def test_too_many_open_requests_are_a_429() -> None:
    """Also where the queue has room. Those who only look are never refused."""
    engine = Speaker()
    with running(fake_model(engine), Settings(port=0, limits=Limits(open_requests=2))) as server:
        engine.hold()
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(server.post, ask()) for _ in range(2)]
            wait_until(lambda: server.metric("shardmill_queue_length") == 1)
            assert server.post(ask())[0] == 429
            assert server.request("GET", "/v1/models")[0] == 200
            engine.free.set()
            assert [answer.result(PATIENCE)[0] for answer in answers] == [200, 200]


def test_a_client_that_leaves_mid_stream_frees_the_engine() -> None:
    """Its request ends with the pass that runs, long before its length; the next one is answered as if alone."""
    engine = Speaker(slots=4096, delay=0.002)
    ended = 'shardmill_requests_total{endpoint="/v1/completions",status="200"}'
    with running(fake_model(engine)) as server:
        expected = server.client().completions.create(**ask()).choices[0].text
        stream = server.client().completions.create(**ask(max_tokens=4000), stream=True)
        next(iter(stream))
        engine.hold()
        assert engine.reached.wait(PATIENCE)
        stream.close()
        wait_until(lambda: server.metric(ended) == 2)
        seen = engine.passes
        engine.free.set()
        wait_until(lambda: server.metric("shardmill_running") == 0)
        assert engine.passes <= seen + 1
        assert server.client().completions.create(**ask()).choices[0].text == expected


def test_a_client_that_leaves_the_queue_makes_room() -> None:
    """Its place is free before the running request ends, and its request never runs."""
    engine = Speaker()
    with running(fake_model(engine), Settings(port=0, limits=Limits(queue=1))) as server:
        engine.hold()
        with ThreadPoolExecutor(1) as pool:
            running_one = pool.submit(server.post, ask())
            assert engine.reached.wait(PATIENCE)
            waiting = open_stream(server, ask(prompt="never run"))
            wait_until(lambda: server.metric("shardmill_queue_length") == 1)
            waiting.close()
            wait_until(lambda: server.metric("shardmill_queue_length") == 0)
            engine.free.set()
            assert running_one.result(PATIENCE)[0] == 200
        assert server.metric('shardmill_tokens_total{kind="generated"}') == 24


def test_a_client_that_leaves_during_a_prefill_frees_the_engine() -> None:
    """A prompt of 4000 tokens is given up after some steps."""
    engine = Speaker(slots=4096, delay=0.002)
    with running(fake_model(engine)) as server:
        engine.hold()
        leaving = open_stream(server, ask(prompt="x" * 4000))
        assert engine.reached.wait(PATIENCE)
        leaving.close()
        wait_until(lambda: server.metric('shardmill_requests_total{endpoint="/v1/completions",status="200"}') == 1)
        engine.free.set()
        wait_until(lambda: server.metric("shardmill_running") == 0)
        assert engine.passes < 100  # of 1000


def test_a_slow_reader_holds_nobody_up_and_loses_nothing() -> None:
    """Its answer is much longer than all buffers on the way; others are served meanwhile, and it gets all of it."""
    request = ask(max_tokens=700, logprobs=20, seed=5, temperature=1, logit_bias={END: -100})
    with running(fake_model(Speaker(slots=1024)), send_buffer=8192) as server:
        slow = open_stream(server, request)
        wait_until(lambda: server.metric('shardmill_tokens_total{kind="generated"}') == 700)
        assert server.client().completions.create(**ask()).choices[0].text
        received = read_all(slow)
        events = [line.removeprefix(b"data: ") for line in received.splitlines() if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        assert text == server.client().completions.create(**request).choices[0].text


def test_a_reader_who_takes_nothing_is_given_up() -> None:
    """After the limit its stream is closed, and with it all that was kept for it."""
    settings = Settings(port=0, limits=Limits(stall_seconds=0.3))
    with running(fake_model(Speaker(slots=1024)), settings, send_buffer=8192) as server:
        stalled = open_stream(server, ask(max_tokens=1000, logprobs=20))
        wait_until(lambda: server.metric('shardmill_requests_total{endpoint="/v1/completions",status="200"}') == 1)
        assert b"[DONE]" not in read_all(stalled)


def test_metrics_count_what_happened() -> None:
    """Counters and histograms of one known request."""
    with running(fake_model()) as server:
        server.post(ask(max_tokens=40, shardmill={"drafter": "suffix"}))
        passes = server.metric('shardmill_decode_passes_total{drafter="suffix"}')
        accepted = server.metric('shardmill_accepted_tokens_total{drafter="suffix"}')
        assert passes + accepted == 39
        assert server.metric('shardmill_tokens_total{kind="prefilled"}') == 16
        assert server.metric('shardmill_tokens_per_pass_sum{drafter="suffix"}') == pytest.approx(39 / passes)
        for name in ("queue", "first_token", "request"):
            assert server.metric(f"shardmill_{name}_seconds_count") == 1
        server.request("GET", "/no/such/page")
        assert server.metric('shardmill_requests_total{endpoint="other",status="404"}') == 1


def test_threads_do_not_grow_with_clients() -> None:
    """One thread runs the engine, however many ask."""
    with running(fake_model()) as server:
        for i in range(3):
            text_of(server, i, stream=True)
        assert sum(thread.name == "engine" for thread in threading.enumerate()) == 1


def open_stream(server: Running, request: dict[str, Any]) -> socket.socket:
    """A client with little room to receive that has asked for a stream and read nothing yet."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({**request, "model": NAME, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes, chunk framing removed."""
    received = b""
    while data := connection.recv(1 << 16):
        received += data
    connection.close()
    return received
