"""A server on a free loopback port, in a thread of the test, and ways to talk to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openai import OpenAI
from patience import PATIENCE

from shardmill.serve.app import create_app
from shardmill.serve.engine_worker import Worker
from shardmill.serve.listening import bind
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model, Settings
from shardmill.serve.server import Server, around

from .fake import NAME, Speaker


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    port: int
    worker: Worker
    server: Server

    def client(self, key: str = "none") -> OpenAI:
        """OpenAI's own client, without tries of its own."""
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a plain HTTP request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, content: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a request; bytes are sent as they are."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        status, _, answer = self.request("POST", path, body, {"Content-Type": "application/json", **headers})
        return status, json.loads(answer)

    def metric(self, line: str) -> float:
        """The value on a line of /metrics; 0 while there is none."""
        _, _, text = self.request("GET", "/metrics")
        found = [row for row in text.decode().splitlines() if row.startswith(f"{line} ")]
        return float(found[0].split()[-1]) if found else 0.0


@contextmanager
def running(model: Model, settings: Settings | None = None, send_buffer: int = 0) -> Iterator[Running]:
    """The server; it ends in order when the block does.

    Args:
        send_buffer: bytes that the system may hold for a client; 0 leaves it as it is.
    """
    settings = settings or Settings(port=0)
    metrics = Metrics()
    worker = Worker(
        model,
        metrics,
        queue=settings.limits.queue,
        policy=settings.policy,
        draft_table=settings.draft_table,
        context_policy=settings.context_policy,
        prefix_cache=settings.prefix_cache,
    )
    listener = bind(settings.host, settings.port)
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    up = threading.Event()
    server = around(create_app(model, worker, metrics, settings), worker, settings, up.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    worker.start()
    thread.start()
    assert up.wait(PATIENCE)
    try:
        yield Running(listener.getsockname()[1], worker, server)
    finally:
        if isinstance(model.engine, Speaker):
            model.engine.free.set()  # where a test failed while it held the engine
        server.should_exit = True
        thread.join(PATIENCE)
        worker.close(PATIENCE)
        listener.close()
        assert not thread.is_alive()


def ask(**more: Any) -> dict[str, Any]:
    """A short greedy completion, changed by `more`."""
    return {"model": NAME, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, **more}
