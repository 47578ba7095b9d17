"""A server that listens before its model is loaded: what it says is true at every moment, and it ends as any other."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE, wait_until

from shardmill.errors import ShardmillError
from shardmill.runtime.bundles import report_load
from shardmill.runtime.label import Reader
from shardmill.serve.listening import bind
from shardmill.serve.model import Model, Settings
from shardmill.serve.server import FIRST_PASSES, serve

from .fake import Speaker, byte_tokenizer, fake_model
from .running import ask

PROGRAMS = ("layers_00_02", "layers_02_04", "head_0")
TESTS = Path(__file__).parent.parent


class Slow:
    """A load of which each program takes until it is let go on."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.gates = fails, [threading.Event() for _ in (*PROGRAMS, FIRST_PASSES)]

    def __call__(self) -> Model:
        """The model, once every gate is open but the last, which the first passes wait at."""
        for name, gate in zip(PROGRAMS, self.gates, strict=False):
            report_load(name)
            gate.wait()
        if self.fails:
            raise ShardmillError("compiled/head_0.mlmodelc can't be loaded: no")
        model = fake_model(Speaker(slots=512))
        forward = model.engine.forward

        def held(*arguments: Any) -> Any:
            self.gates[-1].wait()
            return forward(*arguments)

        model.engine.forward = held  # type: ignore[method-assign]
        return model


class Served:
    """`serve` in a thread."""

    def __init__(self, load: Callable[[], Any], port: int) -> None:
        self.port, self.said, self.raised = port, [], []  # type: ignore[var-annotated]
        self.thread = threading.Thread(target=self.run, args=(load,), daemon=True)
        self.thread.start()
        wait_until(self.listens)

    def run(self, load: Callable[[], Any]) -> None:
        try:
            with bind("127.0.0.1", self.port) as listener:
                serve(load, Settings(port=self.port), listener, self.said.append, warming=len(PROGRAMS))
        except ShardmillError as error:
            self.raised.append(str(error))

    def listens(self) -> bool:
        try:
            self.request("GET", "/health")
        except OSError:
            return False
        return True

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            content = json.dumps(body).encode() if body is not None else None
            connection.request(method, path, content, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, json.loads(answer.read())
        finally:
            connection.close()

    def health(self) -> tuple[int, Any]:
        status, _, content = self.request("GET", "/health")
        return status, content


@pytest.fixture
def port() -> Iterator[int]:
    """One that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = probe.getsockname()[1]
    yield found


def test_health_tells_each_program_and_then_it_serves(port: int) -> None:
    slow = Slow()
    up = Served(slow, port)
    for place, (name, gate) in enumerate(zip((*PROGRAMS, FIRST_PASSES), slow.gates, strict=True), 1):
        state = {"status": "starting", "part": min(place, 3), "of": 3, "name": name}
        wait_until(lambda state=state: up.health() == (503, state))  # type: ignore[misc]
        assert up.said == []
        gate.set()
    wait_until(lambda: up.health() == (200, {"status": "ok"}))
    status, _, answer = up.request("POST", "/v1/completions", ask())
    assert status == 200 and len(answer["choices"][0]["text"]) > 5
    wait_until(lambda: len(up.said) == 1)
    assert re.fullmatch(rf"serving fake on the \S+ engine at http://127\.0\.0\.1:{port}/v1", up.said[0])


def test_a_request_that_comes_too_early_is_told_to_come_again(port: int) -> None:
    up = Served(Slow(), port)
    for method, path, body in (("POST", "/v1/completions", ask()), ("GET", "/v1/models", None)):
        status, headers, answer = up.request(method, path, body)
        assert (status, headers["retry-after"], answer["error"]["code"]) == (503, "5", "starting")
        assert "program 1 of 3" in answer["error"]["message"]
    assert up.request("GET", "/v1/models", Host="evil.example")[0] == 403  # the gate stands from the beginning


def test_a_load_that_fails_ends_the_server_with_its_line(port: int) -> None:
    slow = Slow(fails=True)
    up = Served(slow, port)
    for gate in slow.gates:
        gate.set()
    up.thread.join(PATIENCE)
    assert up.raised == ["compiled/head_0.mlmodelc can't be loaded: no"] and up.said == []


def test_an_encoder_too_is_served_as_soon_as_it_is_loaded(port: int) -> None:
    gate = threading.Event()

    def load() -> Any:
        report_load("encoder_64")
        gate.wait()
        encoder: Any = SimpleNamespace(manifest={"model": "tiny", "task": "feature-extraction"}, threads=None)
        return Reader(encoder, byte_tokenizer(), None)

    up = Served(load, port)
    state = {"status": "starting", "part": 1, "of": 3, "name": "encoder_64"}
    wait_until(lambda: up.health() == (503, state))
    gate.set()
    wait_until(lambda: up.health() == (200, {"status": "ok"}))
    assert up.request("GET", "/v1/models")[2]["data"][0]["id"] == "tiny"


STUCK = """
import time
from shardmill import cli
from shardmill.commands import serve
from shardmill.runtime.label import Reader
from shardmill.runtime.bundles import report_load
from shardmill.serve import model

def stuck(*_):
    report_load("layers_00_02")
    print("loading", flush=True)
    time.sleep(3600)

model.load_model, serve.programs = stuck, lambda *_: 3
serve.holds_encoder = lambda _: False
cli.main()
"""


def test_sigterm_ends_a_server_that_still_loads(port: int) -> None:
    """In order, and without waiting for a load that takes minutes."""
    command = [sys.executable, "-c", STUCK, "serve", "no-build-needed", "--warm", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGTERM)
    _, complaints = process.communicate(timeout=PATIENCE)
    assert (process.returncode, complaints) == (0, "")
