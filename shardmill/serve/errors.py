"""Error answers to a client: an HTTP status and OpenAI's error object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardmill.errors import ShardmillError
from shardmill.printable import one_line


class ApiError(ShardmillError):
    """A request that is answered with an error.

    Args:
        status: the HTTP status.
        message: one line that names the thing and the remedy.
        kind: OpenAI's `type`.
        code: OpenAI's `code`.
        param: OpenAI's `param`.
        headers: headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(one_line(message))  # messages of libraries may have several lines
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def content(self) -> dict[str, Any]:
        """Return the answer's JSON object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """Return the answer's body; ASCII, as a message may quote text that UTF-8 can't encode."""
        return json.dumps(self.content()).encode("ascii")


class ClientGoneError(ShardmillError):
    """The client closed the connection before its answer was complete."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return error 400, for a request that can't be honoured as it is."""
    return ApiError(400, message, param=param, code=code)


def too_busy(message: str, retry_after: int) -> ApiError:
    """Return error 429 for too many requests, with the seconds after which to try again."""
    headers = {"Retry-After": str(retry_after)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def client_gone() -> ApiError:
    """Return error 499, the status that other servers log for a client that left; nobody reads it."""
    return ApiError(499, "the client closed the connection", kind="client_error")


def shutting_down() -> ApiError:
    """Return error 503, for a server that is shutting down."""
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")


def broken() -> ApiError:
    """Return error 500, for a failure that the client can't change. Details go to the server's log."""
    return ApiError(500, "the server failed to answer; its log says why", kind="server_error", code="internal_error")
