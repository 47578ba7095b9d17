"""What a client is told when a request can't be answered: an HTTP status and OpenAI's error object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardmill.errors import ShardmillError
from shardmill.printable import one_line


class ApiError(ShardmillError):
    """A request that is answered with an error.

    Args:
        message: one line that names the thing and the remedy.
        kind, code, param: OpenAI's `type`, `code` and `param`.
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
        super().__init__(one_line(message))  # libraries' own words may come in several lines
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def content(self) -> dict[str, Any]:
        """The answer's JSON object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """The answer's body; ASCII, as a message may quote text that UTF-8 can't encode."""
        return json.dumps(self.content()).encode("ascii")


class ClientGoneError(ShardmillError):
    """The client closed the connection before its answer was complete."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can't be honoured as it is: 400."""
    return ApiError(400, message, param=param, code=code)


def too_busy(message: str, retry_after: int) -> ApiError:
    """Too many requests: 429, with the seconds after which to try again."""
    headers = {"Retry-After": str(retry_after)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def client_gone() -> ApiError:
    """The client left: 499, the status that other servers log for this; nobody is there to read it."""
    return ApiError(499, "the client closed the connection", kind="client_error")


def shutting_down() -> ApiError:
    """The server ends: 503."""
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")


def broken() -> ApiError:
    """A failure that the client cannot help: 500. Details go to the server's log."""
    return ApiError(500, "the server failed to answer; its log says why", kind="server_error", code="internal_error")
