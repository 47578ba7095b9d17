"""Runs the HTTP server: binds, loads the model, prints its address, and shuts down in order.

On SIGTERM or Ctrl-C it accepts no more requests, cancels the waiting ones, gives the running one `grace_seconds`, and
exits; the exit code after SIGTERM is 0.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from shardmill import machine
from shardmill.errors import ShardmillError
from shardmill.runtime.bundles import report_load
from shardmill.runtime.label import Reader
from shardmill.serve.app import create_app
from shardmill.serve.encoder import EncoderWorker, create_encoder_app
from shardmill.serve.engine_worker import Worker
from shardmill.serve.http import Connection, IdleConnections
from shardmill.serve.loading import FIRST_PASSES, LoadedApp, LoadingApp
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model, Settings

LAST_WORDS = 2.0  # seconds for sending answers after the engine has stopped


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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Announce the server when it accepts connections."""
        await super().startup(sockets)
        self._announce()

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
    load: Callable[[], Model], settings: Settings, announce: Callable[[str], None], warming: int | None = None
) -> None:
    """Serve until a signal ends it.

    Args:
        load: builds the model; called when the address is known to be free.
        settings: the server's settings.
        announce: receives the line with the server's address.
        warming: the number of programs to load, for a server that listens during loading; None for a server that
            listens
            after it.

    Raises:
        ShardmillError: the address can't be used, or `load` failed.
    """
    _serve(partial(_ready, load, settings), settings, announce, warming)


def serve_encoder(
    load: Callable[[], Reader], settings: Settings, announce: Callable[[str], None], warming: int | None = None
) -> None:
    """Serve an encoder until a signal ends it; arguments and errors are the same as for `serve`."""
    _serve(partial(_ready_encoder, load, settings), settings, announce, warming)


def _ready(load: Callable[[], Model], settings: Settings, listener: socket.socket) -> LoadedApp:
    """Load a decoder and run every width once."""
    model, metrics = load(), Metrics()
    report_load(FIRST_PASSES)
    worker = Worker(
        model,
        metrics,
        queue=settings.limits.queue,
        policy=settings.policy,
        draft_table=settings.draft_table,
        context_policy=settings.context_policy,
    )
    return LoadedApp(create_app(model, worker, metrics, settings), worker, greeting(model, settings, listener))


def _ready_encoder(load: Callable[[], Reader], settings: Settings, listener: socket.socket) -> LoadedApp:
    reader, metrics = load(), Metrics()
    desk = EncoderWorker(metrics, settings.limits.queue)
    name = reader.encoder.manifest["model"]
    app = create_encoder_app(name, reader, desk, metrics, settings)
    return LoadedApp(app, desk, _greeting(name, machine.engine()["name"], reader.encoder.threads, settings, listener))


def _serve(
    make: Callable[[socket.socket], LoadedApp], settings: Settings, announce: Callable[[str], None], warming: int | None
) -> None:
    listener = bind(settings)
    try:
        if warming is not None:
            _serve_warming(partial(make, listener), settings, announce, warming, listener)
            return
        ready = make(listener)
        server = around(ready.app, ready.worker, settings, lambda: announce(ready.greeting))
        ready.worker.start()
        _serve_until_signal(server, ready.worker, listener)
    finally:
        listener.close()


def _serve_warming(
    make: Callable[[], LoadedApp],
    settings: Settings,
    announce: Callable[[str], None],
    programs: int,
    listener: socket.socket,
) -> None:
    """Listen first, and load the model meanwhile."""
    warming = LoadingApp(make, programs, settings, announce)
    loader = threading.Thread(target=warming.load, name="loader", daemon=True)  # ends with the process
    server = around(warming, warming, settings, loader.start)
    _serve_until_signal(server, warming, listener)


def _serve_until_signal(server: Server, worker: Worker | EncoderWorker | LoadingApp, listener: socket.socket) -> None:
    """Run the server, then close its worker. Raise the worker's error, if one ended the server."""
    worker.stop = lambda: setattr(server, "should_exit", True)
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
        timeout_graceful_shutdown=int(limits.grace_seconds + LAST_WORDS),
    )
    return Server(config, worker, limits.grace_seconds, announce)


def bind(settings: Settings) -> socket.socket:
    """Bind a socket to the address; it does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        where = f"{settings.host}:{settings.port}"
        raise ShardmillError(f"can't listen at {where}: {why}; choose another --host or --port") from error
    return listener


def greeting(model: Model, settings: Settings, listener: socket.socket) -> str:
    """Return the line with the server's address."""
    return _greeting(model.name, model.engine_name, model.threads, settings, listener)


def _greeting(name: str, engine: str, threads: int | None, settings: Settings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    using = f" ({threads} thread{'s' * (threads > 1)})" if threads else ""
    return f"serving {name} on the {engine} engine{using} at http://{host}:{listener.getsockname()[1]}/v1"


def _run(server: Server, listener: socket.socket) -> None:
    """Run the server. uvicorn raises a signal again after its shutdown; here SIGTERM must not kill the process then."""
    if threading.current_thread() is not threading.main_thread():
        server.run(sockets=[listener])
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
