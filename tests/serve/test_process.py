"""The server as a process: how it starts, how signals end it, and that it comes back after the hardest of them."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from patience import PATIENCE, wait_until

from shardmill.errors import EngineGoneError, ShardmillError
from shardmill.serve.listening import bind
from shardmill.serve.model import Limits, Settings
from shardmill.serve.server import _Complaints, serve, within_descriptors

from .fake import Speaker, fake_model
from .running import ask, running

TESTS = Path(__file__).parent.parent


@contextmanager
def process(
    delay: float, *options: str, passes: int = -1, files: int = 0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its base address, read from its first line. After some passes it waits for a line.

    Args:
        files: how many files it may open; 0: as many as the test.
    """
    command = [sys.executable, "-m", "serve.process", str(delay), str(passes), *options]
    if files:
        command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *command]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        command,
        cwd=TESTS,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(PATIENCE, server.kill)
    timer.start()
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.fullmatch(r"serving fake on the scripted engine at (http://127\.0\.0\.1:\d+/v1)\n", line)
        assert found, (line, server.communicate())
        yield server, found[1]
    finally:
        timer.cancel()
        server.kill()
        server.communicate()


def client(base: str) -> OpenAI:
    return OpenAI(base_url=base, api_key="none", max_retries=0, timeout=PATIENCE)


def is_refused(base: str) -> bool:
    """Whether the server accepts no connection."""
    port = int(base.rsplit(":", 1)[1].removesuffix("/v1"))
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def queued(base: str) -> int:
    """How many requests wait for the engine."""
    text = httpx2.get(f"{base.removesuffix('/v1')}/metrics", trust_env=False).text
    return int(float(next(line for line in text.splitlines() if line.startswith("shardmill_queue_length ")).split()[1]))


@pytest.mark.thorough
def test_sigterm_finishes_what_runs_refuses_what_waits_and_exits_0() -> None:
    """The running stream comes to its end, the waiting request is a 503, nothing is written to stderr."""
    with process(0.0, "--port", "0", "--grace-seconds", str(PATIENCE), passes=20) as (server, base):
        stream = iter(client(base).completions.create(**ask(max_tokens=60), stream=True))
        pieces = [next(stream).choices[0].text]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client(base).completions.create, **ask())
            wait_until(lambda: queued(base) == 1)
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: is_refused(base))
            assert server.stdin is not None
            server.stdin.write("\n")
            server.stdin.flush()
            last = None
            for chunk in stream:
                pieces.append(chunk.choices[0].text)
                last = chunk.choices[0].finish_reason
            assert last == "length"
            with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
                waiting.result(PATIENCE)
        _, complaints = server.communicate(timeout=PATIENCE)
        assert server.returncode == 0 and complaints == ""
    assert len("".join(pieces)) > 20


def test_a_second_ctrl_c_ends_the_running_answer_in_one_line() -> None:
    """The client is told, and the terminal sees no traceback, however long the grace period is."""
    with process(0.02, "--port", "0", "--grace-seconds", "3000") as (server, base):
        stream = iter(client(base).completions.create(**ask(max_tokens=4000), stream=True))
        next(stream)
        server.send_signal(signal.SIGINT)
        wait_until(lambda: is_refused(base))  # so the first signal has been handled
        next(stream)
        server.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        _, complaints = server.communicate(timeout=PATIENCE)
        assert server.returncode == 130 and {*complaints.splitlines()} == {"shardmill: interrupted"}


@pytest.mark.thorough
def test_after_sigkill_it_serves_again_at_the_same_port() -> None:
    """A client notices at once, and the next process gives the same answer at the same address."""
    with process(0.02, "--port", "0") as (server, base):
        expected = client(base).completions.create(**ask()).choices[0].text
        stream = iter(client(base).completions.create(**ask(max_tokens=2000), stream=True))
        next(stream)
        server.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIConnectionError):
            list(stream)
    port = base.rsplit(":", 1)[1].removesuffix("/v1")
    with process(0.0, "--port", port) as (_, again):
        assert again == base
        assert client(again).completions.create(**ask()).choices[0].text == expected


def test_a_shutdown_ends_an_endless_answer_after_its_grace() -> None:
    """The stream says so in an error event instead of [DONE]."""
    engine = Speaker(slots=4096, delay=0.005)
    with running(fake_model(engine), Settings(port=0, limits=Limits(grace_seconds=0.3))) as server:
        stream = iter(server.client().completions.create(**ask(max_tokens=4000), stream=True))
        next(stream)
        server.server.should_exit = True
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def test_a_port_in_use_is_one_clear_line() -> None:
    """It names the address and the remedy, before any model is loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ShardmillError, match=r"can't listen at 127.0.0.1:\d+: .*--port"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ShardmillError, match="can't listen at no.such.host.invalid"):
        bind("no.such.host.invalid", 8000)


@pytest.mark.parametrize("host", ["a" * 64, f"{'a' * 64}.example", "a..b"])
def test_what_can_be_no_name_of_a_host_is_one_clear_line(host: str) -> None:
    """Python finds it out while it encodes the name, before it asks anybody."""
    with pytest.raises(ShardmillError, match=rf"can't listen at {host}:\d+: no name of a host; .*--host"):
        bind(host, 8000)


def test_a_socket_that_can_not_be_bound_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class Kept(socket.socket):
        def bind(self, address: object) -> None:
            made.append(self)
            raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket, "socket", Kept)
    with pytest.raises(ShardmillError, match="Address already in use"):
        bind("127.0.0.1", 0)
    assert [each.fileno() for each in made] == [-1]


def test_health_tells_when_the_engine_is_gone() -> None:
    """A load balancer is told 503 once no request would be answered."""
    with running(fake_model()) as server:
        assert server.request("GET", "/health")[0] == 200
        server.worker.close(PATIENCE)
        status, _, body = server.request("GET", "/health")
        assert (status, json.loads(body)["status"]) == (503, "unavailable")
        assert server.post(ask())[0] == 503


class Dying(Speaker):
    """An engine that is gone after some passes, as the process that runs a model's programs may be."""

    left = 1 << 30

    def forward(self, *given: Any) -> Any:
        self.left -= 1
        self._check()
        return super().forward(*given)

    def reset(self) -> None:
        self._check()
        super().reset()

    def _check(self) -> None:
        if self.left < 0:
            raise EngineGoneError("the process that runs the programs of build/fake ended with SIGSEGV; start again")


def served(engine: Speaker, warming: int | None, said: list[str], raised: list[Exception]) -> threading.Thread:
    """A server in a thread; what it announces and how it fails is in the lists."""

    def run() -> None:
        try:
            with bind("127.0.0.1", 0) as listener:
                serve(lambda: fake_model(engine), Settings(port=0), listener, said.append, warming)
        except ShardmillError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("warming", [None, 1])
def test_when_the_engine_is_gone_the_client_is_answered_and_the_server_ends_with_its_words(
    warming: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for ever, and whoever started the server learns of it by its exit code and a line of the log."""
    engine, said, raised = Dying(slots=512), list[str](), list[Exception]()
    thread = served(engine, warming, said, raised)
    wait_until(lambda: bool(said))
    engine.left = 2
    connection = http.client.HTTPConnection("127.0.0.1", int(said[0].rpartition(":")[2].partition("/")[0]))
    connection.request("POST", "/v1/completions", json.dumps(ask()).encode(), {"Content-Type": "application/json"})
    assert connection.getresponse().status == 500
    thread.join(PATIENCE)
    assert raised and "ended with SIGSEGV" in str(raised[0])
    (line,) = (record for record in caplog.records if record.name == "shardmill.serve.engine_worker")
    assert "ended with SIGSEGV" in line.getMessage() and line.exc_info is None


class Watched(Speaker):
    """An engine in a process that ends when the test says so, or before anybody asks for its end."""

    def __init__(self, ended: bool) -> None:
        super().__init__()
        self.process, self.ended = self, ended
        self.tell: Callable[[Exception], None] | None = None

    def when_gone(self, told: Callable[[Exception], None]) -> None:
        self.tell = told
        if self.ended:
            self.end()

    def end(self) -> None:
        assert self.tell is not None
        self.tell(EngineGoneError("the process that runs the programs of build/fake ended with SIGKILL; start again"))


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("warming", [None, 1])
def test_when_the_engine_is_gone_while_nobody_asks_the_server_ends_too(
    warming: int | None, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever started it learns of it before a client does, also if that is before the server listens."""
    monkeypatch.setattr("shardmill.serve.server.Remote", Watched)
    engine, said, raised = Watched(ended), list[str](), list[Exception]()
    thread = served(engine, warming, said, raised)
    if not ended:
        wait_until(lambda: bool(said))
        engine.end()
    thread.join(PATIENCE)
    assert raised and "ended with SIGKILL" in str(raised[0])


def test_a_closed_terminal_ends_it_like_sigterm() -> None:
    """A running stream is told so, and nothing is left running."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup tests ignore it, and so would the server
    try:
        with process(0.02, "--port", "0", "--grace-seconds", "0") as (server, base):
            stream = iter(client(base).completions.create(**ask(max_tokens=4000), stream=True))
            next(stream)
            server.send_signal(signal.SIGHUP)
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                list(stream)
            _, complaints = server.communicate(timeout=PATIENCE)
            assert server.returncode == 0 and complaints == ""
    finally:
        signal.signal(signal.SIGHUP, before)


def test_more_connections_than_it_may_open_files_are_no_complaint() -> None:
    """The oldest idle ones give way, and a request is answered beside them."""
    with process(0.0, "--port", "0", files=400) as (server, base):
        port = int(base.rsplit(":", 1)[1].removesuffix("/v1"))
        idle = [socket.create_connection(("127.0.0.1", port), PATIENCE) for _ in range(300)]
        assert client(base).completions.create(**ask()).choices[0].text
        for connection in idle:
            connection.close()
        server.send_signal(signal.SIGTERM)
        _, complaints = server.communicate(timeout=PATIENCE)
        assert server.returncode == 0 and complaints == ""


@pytest.mark.parametrize(
    ("soft", "hard", "idle", "raised"),
    [(256, 4096, 256, 832), (256, 512, 160, 512), (256, 256, 64, 256), (1024, 1024, 256, 1024), (256, -1, 256, 832)],
)
def test_connections_fit_the_files_that_may_be_open(
    soft: int, hard: int, idle: int, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The soft limit rises as far as the hard one allows; a Mac begins with 256."""
    found = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    fitted = within_descriptors(Limits())
    assert (fitted.idle_connections, fitted.open_requests, found[-1][0]) == (idle, idle, raised)
    assert 2 * idle + 2 * fitted.backlog + 64 <= raised


def test_a_lack_of_files_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio reports it thousands of times a second; anything else is reported as ever."""
    loop, complaints = asyncio.new_event_loop(), _Complaints()
    try:
        for _ in range(100):
            complaints.hear(loop, {"message": "socket.accept()", "exception": OSError(errno.EMFILE, "too many")})
        assert [record.message for record in caplog.records] == [
            "connections wait, as this process may open no more files: raise its limit (ulimit -n)"
        ]
        complaints.hear(loop, {"message": "a task failed", "exception": OSError(errno.EIO, "broken")})
        assert "a task failed" in caplog.records[-1].message
    finally:
        loop.close()
