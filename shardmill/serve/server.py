"""Runs the HTTP server: binds, loads the model, prints its address, and shuts down in order.

On SIGTERM or Ctrl-C it accepts no more requests, cancels the waiting ones, gives the running one `grace_seconds`, and
exits; the exit code after SIGTERM is 0.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from shardmill import machine
from shardmill.runtime.bundles import on_program_load, report_load
from shardmill.runtime.label import Reader
from shardmill.runtime.process import Remote
from shardmill.serve.app import create_app, json_response
from shardmill.serve.encoder import EncoderWorker, create_encoder_app
from shardmill.serve.engine_worker import Worker
from shardmill.serve.http import Connection, IdleConnections, admitted, respond
from shardmill.serve.listening import UNIX
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Limits, Model, Settings
from shardmill.serve.opening import opening_of
from shardmill.serve.pages import page_at
from shardmill.serve.protocol import ApiError
from shardmill.templates.render import Renderer

log = logging.getLogger(__name__)
RETRY_AFTER = 5  # seconds
EVERY = 60.0  # seconds between two complaints of the same kind
FIRST_PASSES = "the first pass of every width"


@dataclass(frozen=True)
class LoadedApp:
    """A loaded model, ready for serving: the application, its worker, and the line that announces it.

    Attributes:
        engine: what runs the programs.
    """

    app: ASGIApp
    worker: Worker | EncoderWorker
    greeting: str
    engine: object

    def start(self, stop: Callable[[], None]) -> None:
        """Start the worker; `stop` is called when the engine can't be used any more, even if no request needs it."""
        self.worker.stop = stop
        self.worker.start()
        if isinstance(self.engine, Remote):
            self.engine.process.when_gone(self.worker.give_up)


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
        self._app: ASGIApp = admitted(self._starting, settings, Metrics())
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
            with on_program_load(self._begins):
                ready = self._make()
            with self._lock:
                if self._closing:
                    return
                self._worker, self._app = ready.worker, ready.app
                ready.start(self._ended)
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

    async def _starting(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            state = {"status": "starting", "part": self._part, "of": self._of, "name": self._name}
            await json_response(state, 503)(scope, receive, send)
            return
        if (page := page_at(scope["path"])) is not None:
            await page(scope, receive, send)
            return
        error = ApiError(
            503,
            f"the model is being loaded, program {self._part} of {self._of}: try again later",
            kind="server_error",
            code="starting",
            headers={"Retry-After": str(RETRY_AFTER)},
        )
        await respond(error)(scope, receive, send)


OWN_FILES = 64  # descriptors of no connection
FEWEST = 8  # connections of each kind
LAST_WORDS = 2.0  # seconds for sending answers after the engine has stopped


class _Complaints:
    """A handler of what the event loop reports. It logs a lack of descriptors once a minute."""

    def __init__(self) -> None:
        self._again = 0.0

    def hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what the loop reports."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._again:
            self._again = loop.time() + EVERY
            log.error("connections wait, as this process may open no more files: raise its limit (ulimit -n)")


class Server(uvicorn.Server):
    """uvicorn's server, which also shuts down the worker."""

    def __init__(
        self,
        config: uvicorn.Config,
        worker: Worker | EncoderWorker | LoadingApp,
        grace: float,
        announce: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._worker, self._grace, self._announce = worker, grace, announce
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Announce the server when it accepts connections."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_Complaints().hear)
        await super().startup(sockets)
        self._announce()

    def end(self) -> None:
        """End the server in order, from any thread."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the running request without the grace period at a second Ctrl-C; uvicorn would print a traceback."""
        if self.should_exit and sig == signal.SIGINT and self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_now)
        else:
            super().handle_exit(sig, frame)

    def _end_now(self) -> None:
        self._worker.refuse()
        self._worker.cancel_running()
        asyncio.get_running_loop().call_later(LAST_WORDS / 2, self._hang_up)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancel the waiting requests at once and the running one after the grace period."""
        self._worker.refuse()
        loop = asyncio.get_running_loop()
        loop.call_later(self._grace, self._worker.cancel_running)
        loop.call_later(self._grace + LAST_WORDS / 2, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        """Abort connections whose clients read nothing; uvicorn would log a traceback for each."""
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


def serve(
    load: Callable[[], Model | Reader],
    settings: Settings,
    listener: socket.socket,
    announce: Callable[[str], None],
    warming: int | None = None,
    opened: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve a decoder or an encoder until a signal ends it.

    Args:
        load: loads the model.
        settings: the server's settings.
        listener: the socket, which need not listen yet.
        announce: receives the line with the server's address.
        warming: the number of programs to load, for a server that listens during loading; None for a server that
            listens after it.
        opened: receives the address of the page to chat with when the server listens, which may be before the model is
            loaded.

    Raises:
        ShardmillError: `load` failed.
    """
    settings = replace(settings, limits=within_descriptors(settings.limits))
    make, page = partial(_ready, load, settings, listener), f"{_address(settings, listener)}/"
    if warming is None:
        ready = make()

        def listens() -> None:
            announce(ready.greeting)
            opened(page)

        server = around(ready.app, ready.worker, settings, listens)
        ready.start(server.end)
        _serve_until_signal(server, ready.worker, listener)
    else:
        starting = LoadingApp(make, warming, settings, announce)
        loader = threading.Thread(target=starting.load, name="loader", daemon=True)  # ends with the process

        def begins() -> None:
            opened(page)
            loader.start()

        server = around(starting, starting, settings, begins)
        starting.stop = server.end
        _serve_until_signal(server, starting, listener)


def _ready(load: Callable[[], Model | Reader], settings: Settings, listener: socket.socket) -> LoadedApp:
    """Load a model, and run every width of a decoder once."""
    model, metrics = load(), Metrics()
    engines = {"engine": model.encoder if isinstance(model, Reader) else model.engine}
    renderer = None if isinstance(model, Reader) else model.template
    if not isinstance(model, Reader) and model.draft_session is not None:
        engines["draft_engine"] = model.draft_session.engine

    def processes() -> dict[str, int]:
        loaded = {name: one.process.child.pid for name, one in engines.items() if isinstance(one, Remote)}
        templates = {"templates": renderer.pid} if isinstance(renderer, Renderer) and renderer.pid else {}
        return {"server": os.getpid(), **loaded, **templates}

    metrics.describe(*_served(model), processes)
    if isinstance(model, Reader):
        encoder, desk = model.encoder, EncoderWorker(metrics, settings.limits.queue)
        greeting = _greeting(*_served(model), encoder.threads, settings, listener)
        return LoadedApp(create_encoder_app(model, desk, metrics, settings), desk, greeting, encoder)
    report_load(FIRST_PASSES)
    worker = Worker(
        model,
        metrics,
        queue=settings.limits.queue,
        policy=settings.policy,
        draft_table=settings.draft_table,
        context_policy=settings.context_policy,
        prefix_cache=settings.prefix_cache,
        opening=opening_of(model, settings.system_prompt) if settings.system_prompt else (),
    )
    greeting = _greeting(*_served(model), model.threads, settings, listener)
    return LoadedApp(create_app(model, worker, metrics, settings), worker, greeting, model.engine)


def _served(model: Model | Reader) -> tuple[str, str]:
    """Return the names of a model and of the engine that runs it."""
    if isinstance(model, Reader):
        return str(model.encoder.manifest["model"]), machine.engine_name()
    return model.name, model.engine_name


def _serve_until_signal(server: Server, worker: Worker | EncoderWorker | LoadingApp, listener: socket.socket) -> None:
    """Run the server, then close its worker. Raise the worker's error, if one ended the server."""
    try:
        _run(server, listener)
    finally:
        worker.close(timeout=LAST_WORDS)
    if worker.error is not None:
        raise worker.error


def around(
    app: ASGIApp, worker: Worker | EncoderWorker | LoadingApp, settings: Settings, announce: Callable[[], None]
) -> Server:
    """Build the server of an application."""
    limits = settings.limits
    config = uvicorn.Config(
        app,
        http=partial(Connection, lobby=IdleConnections(limits)),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        lifespan="off",
        log_level="warning",
        server_header=False,
        timeout_keep_alive=ceil(limits.kept_seconds),
        timeout_graceful_shutdown=int(limits.grace_seconds + LAST_WORDS),
        backlog=limits.backlog,
    )
    return Server(config, worker, limits.grace_seconds, announce)


def within_descriptors(limits: Limits) -> Limits:
    """Raise this process' limit of open files, a Mac's 256 for one, and fit the connections to what it is then.

    Where descriptors lack, no connection is accepted, and asyncio reports it thousands of times a second.
    """
    needed = limits.idle_connections + limits.open_requests + OWN_FILES + 2 * limits.backlog
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):  # a system may have a lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    backlog = min(limits.backlog, most // 8)  # asyncio accepts as many at once, and as many more are being closed
    share = max(FEWEST, (most - OWN_FILES - 2 * backlog) // 2)
    return replace(
        limits,
        backlog=backlog,
        idle_connections=min(limits.idle_connections, share),
        open_requests=min(limits.open_requests, share),
    )


def _greeting(name: str, engine: str, threads: int | None, settings: Settings, listener: socket.socket) -> str:
    """Return the line with the server's address."""
    using = f" ({threads} thread{'s' * (threads > 1)})" if threads else ""
    end = "" if settings.host.startswith(UNIX) else "/v1"
    return f"serving {name} on the {engine} engine{using} at {_address(settings, listener)}{end}"


def _address(settings: Settings, listener: socket.socket) -> str:
    """Return the server's address, without a slash at its end."""
    if settings.host.startswith(UNIX):
        return settings.host
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _run(server: Server, listener: socket.socket) -> None:
    """Run the server. uvicorn raises a signal again after its shutdown; here SIGTERM must not kill the process then."""
    if threading.current_thread() is not threading.main_thread():
        server.run(sockets=[listener])
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    hangs_up = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL  # under nohup the signal is ignored, and stays so
    if hangs_up:  # the terminal is closed
        signal.signal(signal.SIGHUP, lambda number, frame: server.handle_exit(signal.SIGTERM, frame))
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
        if hangs_up:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
