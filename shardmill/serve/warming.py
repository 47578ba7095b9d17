"""A server that listens while its model is being loaded, and says how far that is.

Until the model is there, /health is a 503 that tells which program of how many is being loaded, and everything else is
a 503 with Retry-After. From one request to the next the application takes over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from shardmill.runtime import loading
from shardmill.serve.errors import ApiError
from shardmill.serve.gate import Gate, respond
from shardmill.serve.metrics import Metrics
from shardmill.serve.pages import json_response
from shardmill.serve.reading import Desk
from shardmill.serve.settings import Settings
from shardmill.serve.worker import Worker

RETRY_AFTER = 5  # seconds
FIRST_PASSES = "the first pass of every width"


@dataclass(frozen=True)
class Ready:
    """What a loaded model is served with: the application, what does its work, and the line that announces it."""

    app: ASGIApp
    worker: Worker | Desk
    greeting: str


class Warming:
    """An application that is not there yet, and afterwards that application.

    Args:
        make: loads the model; runs in a thread of its own.
        programs: how many it loads.
        settings: of the server.
        announce: takes the greeting, once requests are answered.

    Attributes:
        stop: ends the server, where the load has failed.
        error: why it has.
    """

    def __init__(
        self,
        make: Callable[[], Ready],
        programs: int,
        settings: Settings,
        announce: Callable[[str], None],
    ) -> None:
        self._make, self._of, self._announce = make, programs, announce
        self.stop: Callable[[], None] = lambda: None
        self._app: ASGIApp = Gate(self._starting, settings, Metrics())
        self._part, self._name = 0, ""
        self._worker: Worker | Desk | None = None
        self._closing = False
        self._lock = threading.Lock()
        self.error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or has the application answer."""
        await self._app(scope, receive, send)

    def load(self) -> None:
        """Loads the model and takes it into service."""
        try:
            with loading.told(self._begins):
                ready = self._make()
            with self._lock:
                if self._closing:
                    return
                ready.worker.stop = self._ended
                ready.worker.start()
                self._worker, self._app = ready.worker, ready.app
            self._announce(ready.greeting)
        except Exception as error:
            self.error = error
            self.stop()

    def _ended(self) -> None:
        """End the server, because its worker has ended."""
        self.error = self._worker.error if self._worker else None
        self.stop()

    def refuse(self) -> None:
        """The server ends: no request is taken any more, and no model."""
        with self._lock:
            self._closing = True
        if self._worker is not None:
            self._worker.refuse()

    def cancel_running(self) -> None:
        """Ends what runs."""
        if self._worker is not None:
            self._worker.cancel_running()

    def close(self, timeout: float) -> None:
        """Ends everything."""
        self.refuse()
        if self._worker is not None:
            self._worker.close(timeout)

    def _begins(self, name: str) -> None:
        self._part, self._name = min(self._part + 1, self._of), name

    def _state(self) -> dict[str, Any]:
        return {"status": "starting", "part": self._part, "of": self._of, "name": self._name}

    async def _starting(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state()
        if scope["path"] == "/health":
            await json_response(state, 503)(scope, receive, send)
            return
        error = ApiError(
            503,
            f"the model is being loaded, program {state['part']} of {state['of']}: try again later",
            kind="server_error",
            code="starting",
            headers={"Retry-After": str(RETRY_AFTER)},
        )
        await respond(error)(scope, receive, send)
