"""A server that listens while its model is being loaded, and reports the progress.

During loading, /health answers 503 with the number of the current program and of all programs, and everything else
answers 503 with Retry-After. Afterwards the loaded application answers all requests.
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
    """A loaded model, ready for serving: the application, its worker, and the line that announces it."""

    app: ASGIApp
    worker: Worker | Desk
    greeting: str


class Warming:
    """An application that answers 503 during loading, and then delegates to the loaded application.

    Args:
        make: loads the model; runs in a separate thread.
        programs: number of programs that it loads.
        settings: the server's settings.
        announce: receives the greeting when requests are answered.

    Attributes:
        stop: ends the server; called if the load fails.
        error: the error of the load or the worker.
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
        """Answer a request, or pass it on to the loaded application."""
        await self._app(scope, receive, send)

    def load(self) -> None:
        """Load the model and start serving it."""
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
        """Accept no more requests, and no loaded model."""
        with self._lock:
            self._closing = True
        if self._worker is not None:
            self._worker.refuse()

    def cancel_running(self) -> None:
        """Cancel the running request."""
        if self._worker is not None:
            self._worker.cancel_running()

    def close(self, timeout: float) -> None:
        """Close the worker, if the model is loaded."""
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
