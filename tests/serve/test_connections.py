"""Connections that never send a request are bounded in number and in time; those that do are left alone."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator

import pytest
from patience import PATIENCE, wait_until

from shardmill.serve.model import Limits, Settings

from .fake import Speaker, fake_model
from .running import Running, ask, running

SECONDS, MOST = 0.5, 8
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = Limits(head_seconds=SECONDS, kept_seconds=SECONDS, idle_connections=MOST)
    with running(fake_model(Speaker(delay=0.05)), Settings(port=0, limits=limits)) as up:
        yield up


def connect(server: Running, sent: bytes = b"") -> socket.socket:
    """A connection on which this was sent."""
    connection = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server ends the connection, without a byte, before the test's patience is over."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def is_answered(connection: socket.socket) -> bool:
    """Whether the whole answer to HEALTH comes."""
    received = b""
    while not received.endswith(b'{"status": "ok"}'):
        piece = connection.recv(4096)
        if not piece:
            return False
        received += piece
    return True


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEALTH[:-2]], ids=["nothing", "a line's beginning", "no end"])
def test_a_head_that_does_not_arrive_is_given_up(server: Running, sent: bytes) -> None:
    with connect(server, sent) as connection:
        assert is_closed(connection)


def test_so_is_that_of_a_second_request(server: Running) -> None:
    """uvicorn's own time between requests ends with the first byte."""
    with connect(server, HEALTH) as connection:
        assert is_answered(connection)
        connection.sendall(HEALTH[:-2])
        assert is_closed(connection)


def test_an_answered_connection_is_kept_for_longer() -> None:
    """Clients use it again, and many let go of it after five seconds themselves: it must not be gone when they ask."""
    limits = Limits(head_seconds=0.05, kept_seconds=PATIENCE)
    with running(fake_model(), Settings(port=0, limits=limits)) as up, connect(up, HEALTH) as kept:
        assert is_answered(kept)
        assert is_closed(connect(up))
        kept.sendall(HEALTH)
        assert is_answered(kept)
    assert Limits().kept_seconds > 5


NO_REQUESTS = {
    "no Host": b"GET /health HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "a bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "two lengths": HEALTH[:-2] + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "words": b"hello there\r\n\r\n",
}


@pytest.mark.parametrize("what", NO_REQUESTS)
def test_what_is_no_request_is_told_in_openai_s_form(server: Running, what: str) -> None:
    """Such bytes reach no application, so uvicorn would answer in plain text."""
    with connect(server, NO_REQUESTS[what]) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert error["type"] == "invalid_request_error" and error["message"].startswith("this is no HTTP request")
    assert error.keys() == {"message", "type", "param", "code"}


def test_many_idle_connections_hold_nobody_up() -> None:
    """The oldest go, and who asks is answered."""
    with running(fake_model(), Settings(port=0, limits=Limits(head_seconds=PATIENCE, idle_connections=MOST))) as up:
        idle = [connect(up) for _ in range(3 * MOST)]
        assert up.request("GET", "/health")[0] == 200
        assert all(is_closed(connection) for connection in idle[: 2 * MOST])
        assert len(up.server.server_state.connections) <= MOST
        idle[-1].sendall(HEALTH)
        assert is_answered(idle[-1])
        for connection in idle:
            connection.close()


def test_an_answer_may_take_longer(server: Running) -> None:
    """The time is that of a request's head: no answer is cut, and the connection takes the next request."""
    headers = {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    for stream in (False, True):
        body = json.dumps(ask(max_tokens=30, stream=stream))
        connection.request("POST", "/v1/completions", body, headers)
        used, start = connection.sock, time.monotonic()
        assert b'"finish_reason": "length"' in connection.getresponse().read()
        assert time.monotonic() - start > 2 * SECONDS
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200 and connection.sock is used
    connection.close()


@pytest.mark.parametrize(("length", "says"), [(900_000_000_000, b"HTTP/1.1 413 "), (20, b"HTTP/1.1 100 ")])
def test_a_client_that_waits_is_told_before_it_sends_too_much(server: Running, length: int, says: bytes) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n"
    )
    with connect(server, head.encode()) as connection:
        assert connection.recv(13) == says


@pytest.mark.parametrize("comes", [True, False])
def test_a_refusal_waits_for_the_body(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clients send it after the head. A connection that is closed before may lose the answer; but not for ever."""
    monkeypatch.setattr("shardmill.serve.http.LINGER", PATIENCE if comes else 0.05)
    with running(fake_model(), Settings(port=0, api_key="k", limits=Limits(backlog=1))) as up:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
        with connect(up, head) as connection:
            assert up.request("GET", "/health")[0] == 200  # so the head has been read
            if comes:
                with connect(up, head) as another:  # more than may linger: it is answered at once
                    assert another.recv(12) == b"HTTP/1.1 401"
                connection.sendall(b"{}")
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, json.loads(answer.read())["error"]["code"]) == (401, "invalid_api_key")
            if comes:
                connection.sendall(HEALTH)
                assert is_answered(connection)


def test_a_body_that_nobody_needs_is_not_waited_for(server: Running) -> None:
    """Those who only look are not counted, so they must not be able to linger."""
    request = HEALTH[:-2] + b"Content-Length: 100\r\n\r\n{"
    with connect(server, request) as connection:
        assert is_answered(connection)


def test_a_server_that_ends_waits_for_no_body(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever has not sent all of it by then is told so, well before the grace is over, and not by a traceback."""
    body = json.dumps(ask()).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with running(fake_model(), Settings(port=0, limits=Limits(grace_seconds=2 * PATIENCE))) as up:
        half = connect(up, head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body[:-5]))
        wait_until(lambda: any(one.cycle for one in [*up.server.server_state.connections]))  # type: ignore[union-attr]
    with half:
        answer = http.client.HTTPResponse(half)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "shutting_down")
    assert "Traceback" not in capsys.readouterr().err


def test_a_server_that_ends_leaves_who_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader that has stalled neither holds up the end nor makes it look like a failure."""
    limits = Limits(grace_seconds=0, stall_seconds=PATIENCE)
    with running(fake_model(Speaker(slots=4096)), Settings(port=0, limits=limits), send_buffer=4096) as up:
        body = json.dumps(ask(max_tokens=1000, logprobs=20, stream=True)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(("127.0.0.1", up.port))
            stalled.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            wait_until(lambda: any(one.flow.write_paused for one in [*up.server.server_state.connections]))  # type: ignore[union-attr]
            up.server.should_exit = True
            wait_until(lambda: not up.server.server_state.connections)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("origin", "may"), [("http://localhost:3000", True), ("http://evil.example", False)])
def test_a_page_of_an_allowed_origin_may_ask(origin: str, may: bool) -> None:
    """Its browser asks first, without a key; the answer then names the origin, as its errors do."""
    allowed = Settings(port=0, api_key="k", allowed_origins=("http://localhost:3000",))
    asks = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    with running(fake_model(), allowed) as up:
        status, headers, _ = up.request("OPTIONS", "/v1/completions", headers=asks)
        assert (status == 200, headers.get("access-control-allow-origin") == origin) == (may, may)
        for key, expected in (("k", 200), ("other", 401)):
            body = json.dumps(ask(max_tokens=1)).encode()
            sent = {"Origin": origin, "Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            status, headers, _ = up.request("POST", "/v1/completions", body, sent)
            assert status == expected and (headers.get("access-control-allow-origin") == origin) == may
            assert (headers.get("www-authenticate") == "Bearer") == (status == 401)


def test_without_allowed_origins_no_page_may_ask(server: Running) -> None:
    asks = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    status, headers, _ = server.request("OPTIONS", "/v1/completions", headers=asks)
    assert status == 405 and "access-control-allow-origin" not in headers
