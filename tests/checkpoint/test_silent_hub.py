"""A hub that swallows what it is sent, or never lets anybody connect, ends in one line and soon."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from patience import PATIENCE

from shardmill.checkpoint import hub_limits
from shardmill.errors import CheckpointError

from .hub_case import Case
from .hub_server import REPO

SOON = 0.2  # seconds


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """An address that connects, as the system does that for a server, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process that waits for its first answer no longer than a test does."""
    for known in ("_answered", "_silent"):
        monkeypatch.setattr(hub_limits, known, set[str]())
    monkeypatch.setattr(hub_limits, "FIRST_SECONDS", SOON)
    monkeypatch.delenv(hub_limits.FIRST)


def case_at(server: socket.socket, tmp_path: Path) -> Case:
    hub: Any = SimpleNamespace(endpoint=f"http://127.0.0.1:{server.getsockname()[1]}")
    return Case(tmp_path, hub)


def full(server: socket.socket) -> list[socket.socket]:
    """Fill the queue of those who wait for a server to accept them; the next gets no answer at all."""
    server.listen(0)
    waiting = []
    while True:
        one = socket.socket()
        one.settimeout(SOON)
        waiting.append(one)
        try:
            one.connect(server.getsockname())
        except TimeoutError:
            return waiting


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("revision", [None, "c0ffee" + "0" * 34])
@pytest.mark.usefixtures("unanswered")
def test_the_first_answer_must_come_soon(
    silent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None, accepts: bool
) -> None:
    """Whether a branch is asked for or a commit's files; and it is waited for once."""
    waiting = [] if accepts else full(silent)
    said = case_at(silent, tmp_path).refused(REPO, revision)
    monkeypatch.setattr(
        hub_limits, "within", lambda seconds, work, what: work() if what != "127.0.0.1" else pytest.fail()
    )
    assert case_at(silent, tmp_path).refused(REPO, revision) == said
    remedy = "connect to a network, check HF_ENDPOINT and the proxy, or allow more with HF_HUB_ETAG_TIMEOUT=30"
    assert said == f"127.0.0.1: no answer within 0.2 s; {remedy}"
    for one in waiting:
        one.close()


@pytest.mark.usefixtures("unanswered")
def test_a_name_server_that_never_answers_is_no_other_silence(
    silent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No timeout of a connection covers it."""
    never = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: never.wait())
    assert "no answer within" in case_at(silent, tmp_path).refused()
    never.set()


def test_the_client_s_own_variable_allows_more(
    silent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = list[float]()

    def at_once(limit: float, *_: Any) -> None:
        seconds.append(limit)
        raise CheckpointError("no answer")

    monkeypatch.setattr(hub_limits, "_answered", set[str]())
    monkeypatch.setattr(hub_limits, "within", at_once)
    monkeypatch.setenv(hub_limits.FIRST, "30")
    with hub_limits.client() as asking, pytest.raises(CheckpointError):
        asking.get("http://127.0.0.1:9/")
    monkeypatch.delenv(hub_limits.FIRST)
    with hub_limits.client() as asking, pytest.raises(CheckpointError):
        asking.get("http://127.0.0.1:9/")
    assert seconds == [30, 10]


def test_a_listing_of_a_hub_that_falls_silent_ends(
    silent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has answered before, so that more patience is due; the hub client would have had it for ever."""
    monkeypatch.setattr(hub_limits, "_answered", {"127.0.0.1"})
    monkeypatch.setattr(hub_limits, "SILENCE", SOON)
    assert "connection to http://127.0.0.1:" in case_at(silent, tmp_path).refused(revision=None)


def test_what_has_a_timeout_of_its_own_keeps_it(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's bytes have the hub client's, and what writes has none: a hub may take its time for a commit."""
    seen = list[dict[str, Any]]()

    def send(self: httpx2.Client, request: httpx2.Request, **_: Any) -> httpx2.Response:
        seen.append(request.extensions["timeout"])
        return httpx2.Response(200, request=request)

    monkeypatch.setattr(httpx2.Client, "send", send)
    with hub_limits.client() as asking:
        asking.get("http://127.0.0.1:9/", timeout=7)
        asking.get("http://127.0.0.1:9/", timeout=None)
        asking.post("http://127.0.0.1:9/", timeout=None)
    assert [limits["read"] for limits in seen] == [7, hub_limits.SILENCE, None]


def test_what_the_client_asks_of_its_own_accord_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks who uses it, and does without the answer; a busy hub would take a minute for it."""
    monkeypatch.setattr(hub_limits.time, "sleep", lambda _: pytest.fail("waits"))
    monkeypatch.setattr(httpx2.Client, "send", lambda self, request, **_: httpx2.Response(503, request=request))
    with hub_limits.client() as asking:
        assert asking.get("http://127.0.0.1:9/api/agent-harnesses").status_code == 503


def test_late_work_asks_no_more() -> None:
    """Its tries would close connections that other requests of the process use."""
    goes_on, refused = Event(), Queue[str]()

    def work() -> None:
        assert goes_on.wait(PATIENCE)
        try:
            hub_limits.client().get("http://127.0.0.1:9/")
        except CheckpointError as error:
            refused.put(str(error))

    with pytest.raises(CheckpointError, match="no complete answer"):
        hub_limits.within(0.01, work, "the hub")
    goes_on.set()
    assert refused.get(timeout=PATIENCE) == "127.0.0.1: nobody waits for the answer any more"
