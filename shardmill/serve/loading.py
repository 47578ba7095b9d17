"""Load a build, and answer /health while its programs load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from shardmill.decode import ContextPolicy, Session, choose_layout
from shardmill.files import digest
from shardmill.runtime import load, loading
from shardmill.runtime.manifest import read_manifest, verify_width
from shardmill.serve.app import json_response
from shardmill.serve.chat import load_template, turn_end
from shardmill.serve.encoder import EncoderWorker
from shardmill.serve.engine_worker import Worker
from shardmill.serve.http import AdmissionMiddleware, respond
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model, Settings
from shardmill.serve.protocol import ApiError


def load_model(
    build: Path,
    draft_build: Path | None,
    precision: str,
    context_policy: ContextPolicy = "stop",
    chat_template: Path | None = None,
) -> Model:
    """Load a built model, and its draft model if it has one.

    Args:
        build: folder of a finished build.
        draft_build: the draft model's build folder.
        precision: the portable engine's precision, "fp32" or "fp16"; ignored on Core ML.
        context_policy: what happens when the context is full, also for the draft model.
        chat_template: a file with a chat template to use instead of the checkpoint's.

    Raises:
        DecodeError: the context is too small to slide.
        ShardmillError: a folder is not a finished build, or a file in it can't be loaded.
    """
    manifest = read_manifest(build)
    choose_layout(context_policy, manifest["context"], verify_width(manifest))
    tokenizer = load.load_tokenizer(build, manifest)
    template = load_template((build / manifest["tokenizer"]["path"]).parent, chat_template)
    end = turn_end(template, tokenizer) if template else None
    engine = load.load_engine(build, precision)
    ends = tuple(dict.fromkeys(manifest["eos_token_ids"]))
    return Model(
        name=manifest["model"],
        tokenizer=tokenizer,
        template=template,
        engine=engine,
        engine_name=load.engine_name(precision),
        eos=ends if end is None or end in ends else (*ends, end),
        draft_session=Session(load.load_engine(draft_build, precision), context_policy=context_policy)
        if draft_build
        else None,
        fingerprint=digest(manifest),
        tokenizer_digest=manifest["tokenizer"].get("sha256", ""),
        threads=getattr(engine, "threads", None),
    )


RETRY_AFTER = 5  # seconds
FIRST_PASSES = "the first pass of every width"


@dataclass(frozen=True)
class LoadedApp:
    """A loaded model, ready for serving: the application, its worker, and the line that announces it."""

    app: ASGIApp
    worker: Worker | EncoderWorker
    greeting: str


class LoadingApp:
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
        make: Callable[[], LoadedApp],
        programs: int,
        settings: Settings,
        announce: Callable[[str], None],
    ) -> None:
        self._make, self._of, self._announce = make, programs, announce
        self.stop: Callable[[], None] = lambda: None
        self._app: ASGIApp = AdmissionMiddleware(self._starting, settings, Metrics())
        self._part, self._name = 0, ""
        self._worker: Worker | EncoderWorker | None = None
        self._closing = False
        self._lock = threading.Lock()
        self.error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on to the loaded application."""
        await self._app(scope, receive, send)

    def load(self) -> None:
        """Load the model and start serving it."""
        try:
            with loading.on_program_load(self._begins):
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
