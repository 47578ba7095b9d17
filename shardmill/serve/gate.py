"""Checks every request before it is handled: sender, size, speed, and the number of open requests.

This is plain ASGI middleware around the app, so that a stream learns at once when its client leaves. It also counts the
answers.
"""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardmill.serve.errors import ApiError, ClientGoneError, too_busy
from shardmill.serve.loopback import host_name, is_loopback, may_be_asked_for
from shardmill.serve.metrics import Metrics
from shardmill.serve.settings import Settings

ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/label",
    "/v1/embeddings",
    "/v1/models",
    "/health",
    "/metrics",
)
OPEN_TO_ALL = ("/health",)
DISCARD = 16  # multiple of the allowed body size that is read and discarded, so that a client can read its 413


class Gate:
    """Admission middleware: passes a request on with its body read, or answers it with an error."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._limits = settings.limits
        self._metrics = metrics
        self._open = 0
        self._is_private = is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        status = 499  # a client never sees it: it left before its answer began

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        counts = scope["method"] == "POST"  # GET requests never count against the limit
        self._open += counts
        try:
            await self._pass(scope, receive, counted)
        except ClientGoneError:
            pass
        finally:
            self._open -= counts
            self._metrics.requests.labels(_endpoint(scope["path"]), str(status)).inc()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
            async with asyncio.timeout(self._limits.body_seconds):
                body = await self._read(receive) if scope["method"] == "POST" else b""
        except TimeoutError:
            seconds = self._limits.body_seconds
            await respond(ApiError(408, f"the request took over {seconds:g} s to arrive"))(scope, receive, send)
        except ApiError as error:
            await respond(error)(scope, receive, send)
        else:
            await self._app(scope, replay(body, receive), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._is_private and not may_be_asked_for(host, self._settings.host, *self._settings.allowed_hosts):
            # DNS rebinding: a web page whose name resolves to this machine must not reach a local server
            name = host_name(host)
            raise ApiError(
                403,
                f"this server does not answer to the Host {name!r}: if your proxy sends that name, "
                f"start the server with --allowed-host {name}",
            )
        if scope["path"] in OPEN_TO_ALL:
            return
        if not self._may_enter(headers.get("authorization", "")):
            raise ApiError(401, "wrong or missing API key: send Authorization: Bearer KEY", code="invalid_api_key")
        if scope["method"] == "POST" and self._open > self._limits.open_requests:
            raise too_busy(f"{self._limits.open_requests} requests are open already: try again later", 1)

    def _may_enter(self, authorization: str) -> bool:
        key = self._settings.api_key
        scheme, _, given = authorization.partition(" ")
        return key is None or (
            scheme.lower() == "bearer" and hmac.compare_digest(given.encode("latin-1"), key.encode())
        )

    async def _read(self, receive: Receive) -> bytes:
        most, body, size = self._limits.body_bytes, bytearray(), 0
        more = True
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
            raise ApiError(413, f"the request's body is longer than {most} bytes", code="body_too_large")
        return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body, then all later messages."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def respond(error: ApiError) -> Response:
    """Return an error as an answer."""
    return Response(error.body(), error.status, error.headers, "application/json")


def _endpoint(path: str) -> str:
    """Return the path as a metrics label: one of a few, for any path that clients request."""
    return next((known for known in ENDPOINTS if path == known or path.startswith(f"{known}/")), "other")
