"""What stands before the application: which connections, hosts, keys and sizes of requests are admitted."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardmill.serve.listening import is_loopback, is_loopback_address
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Limits, Settings
from shardmill.serve.pages import is_open
from shardmill.serve.protocol import ApiError, ClientGoneError, invalid, shutting_down, too_busy

log = logging.getLogger(__name__)
_LOCALHOST = ("localhost", "localhost.")


def may_be_asked_for(header: str, *names: str) -> bool:
    """Return whether a Host header names this machine: by a loopback address, as localhost, or by one of `names`.

    A hostile web page could make any other name resolve to this machine (DNS rebinding). A missing header is accepted,
    as every browser sends one.
    """
    name = _host_name(header)
    return name in ("", *_LOCALHOST, *map(str.lower, names)) or is_loopback_address(name)


def _host_name(header: str) -> str:
    """Return the name in a Host header in lower case, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses/input_tokens",
    "/v1/responses",
    "/v1/audio/transcriptions",
    "/v1/label",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/decide",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/page",
    "/",
)
MARK = (b"shardmill-ungated", b"see /health")  # a header of all answers of a build whose gates have not passed
DISCARD = 16  # multiple of the allowed body size that is read and discarded, so that a client can read its 413
LINGER = 5.0  # seconds in which the body of a refused request may arrive


class AdmissionMiddleware:
    """Admission middleware: passes a request on with its body read, or answers it with an error."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._limits = settings.limits
        self._metrics = metrics
        self._open = self._leaving = 0  # requests that are answered, and refused ones whose body may arrive
        self._is_private = is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        start = time.perf_counter()
        status = 499  # a client never sees it: it left before its answer began

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._settings.ungated:
                    message["headers"] = [*message["headers"], MARK]
            await send(message)

        try:
            self._check(scope)
            counts = scope["method"] == "POST"  # GET requests never count against the limit
            self._open += counts
            try:
                await self._pass(scope, receive, counted)
            finally:
                self._open -= counts
        except ApiError as error:
            if self._leaving < self._limits.backlog:  # these files are spared for connections that are being closed
                self._leaving += 1
                await _discard(scope, receive, DISCARD * self._limits.body_bytes)
                self._leaving -= 1
            await respond(error)(scope, receive, counted)
        except ClientGoneError:
            pass
        finally:
            endpoint = _endpoint(scope["path"])  # the path and the query themselves may hold anything
            self._metrics.requests.labels(endpoint, str(status)).inc()
            log.info("%s %s %d in %.3f s", scope["method"], endpoint, status, time.perf_counter() - start)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await self._read(Headers(scope=scope), receive) if scope["method"] == "POST" else b""
        except TimeoutError:
            seconds = self._limits.body_seconds
            await respond(ApiError(408, f"the request took over {seconds:g} s to arrive"))(scope, receive, send)
        except ApiError as error:
            await respond(error)(scope, receive, send)
        else:
            await self._app(scope, _replay_body(body, receive), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._is_private and not may_be_asked_for(host, self._settings.host, *self._settings.allowed_hosts):
            # DNS rebinding: a web page whose name resolves to this machine must not reach a local server
            name = _host_name(host)
            raise ApiError(
                403,
                f"this server does not answer to the Host {name!r}: if your proxy sends that name, "
                f"start the server with --allowed-host {name}",
            )
        if is_open(scope["path"]):
            return
        if not self._may_enter(headers.get("authorization", "")):
            why = "wrong or missing API key: send Authorization: Bearer KEY"
            raise ApiError(401, why, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST" and self._open >= self._limits.open_requests:
            raise too_busy(f"{self._limits.open_requests} requests are open already: try again later", 1)

    def _may_enter(self, authorization: str) -> bool:
        key = self._settings.api_key
        scheme, _, token = authorization.partition(" ")
        return key is None or (
            scheme.lower() == "bearer" and hmac.compare_digest(token.encode("latin-1"), key.encode())
        )

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        most, body, size = self._limits.body_bytes, bytearray(), 0
        more = True
        too_large = ApiError(413, f"the request's body is longer than {most} bytes", code="body_too_large")
        if "expect" in headers and int(headers.get("content-length", 0)) > most:  # the client waits before it sends
            raise too_large
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client left while it sent its request")
            chunk = message.get("body", b"")
            size += len(chunk)
            more = message.get("more_body", False) and size <= DISCARD * most
            if size <= most:
                body += chunk
        if size > most:
            raise too_large
        return bytes(body)


async def _discard(scope: Scope, receive: Receive, most: int) -> None:
    """Read the body of a refused request, which may be on its way: a connection closed before it loses the answer."""
    more = scope["method"] == "POST" and b"expect" not in dict(scope["headers"])
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while more and most >= 0:
                message = await receive()
                more, most = message.get("more_body", False), most - len(message.get("body", b""))


def admitted(app: ASGIApp, settings: Settings, metrics: Metrics) -> ASGIApp:
    """Return an application behind its admission, which pages of the allowed origins may ask, too.

    A browser first asks whether it may, without a key, so that question is answered before admission.
    """
    within = AdmissionMiddleware(app, settings, metrics)
    if not settings.allowed_origins:
        return within
    return CORSMiddleware(
        within,
        allow_origins=settings.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("*",),
    )


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body, then all later messages."""
    replayed = False

    async def again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def respond(error: ApiError) -> Response:
    """Return an error as an answer."""
    return Response(error.body(), error.status, error.headers, "application/json")


def _endpoint(path: str) -> str:
    """Return the path as a metrics label: one of a few, for any path that clients request."""
    return next((known for known in ENDPOINTS if path == known or path.startswith(f"{known}/")), "other")


ANSWER = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"


class IdleConnections:
    """The idle connections of one server, the oldest first: connections that have not yet sent a request's head."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[Connection, asyncio.TimerHandle] = {}

    def enter(self, connection: Connection) -> None:
        """Start a connection's timer. If there are too many, close the oldest: real clients send at once."""
        if connection in self._waiting:
            return
        loop = asyncio.get_running_loop()
        seconds = self._limits.head_seconds if connection.cycle is None else self._limits.kept_seconds
        self._waiting[connection] = loop.call_later(seconds, self._dismiss, connection)
        if len(self._waiting) > self._limits.idle_connections:
            self._dismiss(next(iter(self._waiting)))

    def leave(self, connection: Connection) -> None:
        """Remove a connection that has sent a request's head, or is gone."""
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _dismiss(self, connection: Connection) -> None:
        self.leave(connection)
        connection.transport.abort()


class Connection(H11Protocol):
    """uvicorn's connection, which reports to the lobby when it is idle.

    Args:
        lobby: the server's idle connections.
        arguments: uvicorn's own arguments.
    """

    def __init__(self, *, lobby: IdleConnections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lobby = lobby

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self.client = self.client or (f"unix {id(self)}", 0)  # of a socket that is a file, connections have no address
        self._lobby.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._lobby.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP request, in place of uvicorn's plain text; they reach no application."""
        answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not answering:  # otherwise the error would end up in the middle of an answer
            self._dismiss(invalid(f"this is no HTTP request: {msg.removesuffix('.')}"))
        self.transport.close()

    def shutdown(self) -> None:
        """Answer an incomplete request when the server ends; uvicorn would wait for it and then drop it."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self._dismiss(shutting_down())
        super().shutdown()

    def _dismiss(self, error: ApiError) -> None:
        """Close the connection with an error that bypasses the application."""
        body = error.body()
        self.transport.write(ANSWER % (error.status, HTTPStatus(error.status).phrase.encode(), len(body), body))
        self.transport.close()

    def handle_events(self) -> None:
        """Update the lobby after each received piece and each answer; see uvicorn's H11Protocol."""
        super().handle_events()
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._lobby.leave(self)
        else:
            self._lobby.enter(self)
