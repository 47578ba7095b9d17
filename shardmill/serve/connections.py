"""Limits idle HTTP connections in number and time, and answers malformed requests with a JSON error.

uvicorn bounds the time between two requests, but neither the time before the first one nor the time for sending the
head of a request. The gate handles everything after the head.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from shardmill.serve.errors import ApiError, invalid, shutting_down
from shardmill.serve.settings import Limits

ANSWER = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"


class Lobby:
    """The idle connections of one server, the oldest first: connections that have not yet sent a request's head."""

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.head_seconds
        self._most = limits.idle_connections
        self._waiting: dict[Connection, asyncio.TimerHandle] = {}

    def enter(self, connection: Connection) -> None:
        """Start a connection's timer. If there are too many, close the oldest: real clients send at once."""
        if connection in self._waiting:
            return
        loop = asyncio.get_running_loop()
        self._waiting[connection] = loop.call_later(self._seconds, self._dismiss, connection)
        if len(self._waiting) > self._most:
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

    def __init__(self, *, lobby: Lobby, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lobby = lobby

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
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
