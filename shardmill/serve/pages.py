"""Pages of every server: the list of models, /health, /metrics, and errors in OpenAI's form."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shardmill.serve.errors import ApiError, ClientGoneError, broken, client_gone, invalid
from shardmill.serve.gate import respond
from shardmill.serve.metrics import Metrics
from shardmill.serve.schema import EITHER


def check_name(name: str, own: str) -> None:
    """Raise ApiError 404 for any other model than the served one."""
    if name != own:
        message = f"the model {name!r} is not served here; {own!r} is"
        raise ApiError(404, message, param="model", code="model_not_found")


def add_pages(app: FastAPI, own: str, is_well: Callable[[], bool], metrics: Metrics) -> None:
    """Add the pages that every server has.

    Args:
        app: the application.
        own: the model's name for clients.
        is_well: returns whether requests are accepted.
        metrics: the counters for /metrics.
    """
    card = {"id": own, "object": "model", "created": int(time.time()), "owned_by": "shardmill"}

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return json_response({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> Response:
        check_name(name, own)
        return json_response(card)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        return json_response({"status": "ok"}) if is_well() else json_response({"status": "unavailable"}, 503)

    @app.get("/metrics", response_model=None)
    async def metrics_page() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_error_shape(app: FastAPI) -> None:
    """Give every error OpenAI's form."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(ClientGoneError)
    async def left(_: Request, error: ClientGoneError) -> Response:
        return respond(client_gone())

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return respond(broken())  # uvicorn logs the error itself

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return respond(_first_complaint(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        messages = {
            400: "the request's body can't be read as JSON",
            404: f"there is no {path} here",
            405: f"{path} does not take {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return respond(ApiError(error.status_code, message, headers=error.headers))


def _first_complaint(error: RequestValidationError) -> ApiError:
    """Return an error for the first invalid field, in one line."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return invalid(f"the request's body is not JSON: {first['ctx']['error']}")
    if not where and first["type"] in ("missing", "model_attributes_type"):
        return invalid("the request's body must be a JSON object, sent as Content-Type: application/json")
    message = first["msg"].removeprefix("Value error, ")
    for place, field in enumerate(where[:-1]):
        if field in EITHER:
            message, where = EITHER[field], where[: place + 1]
            break
    return invalid(f"{'.'.join(where)}: {message}" if where else message, where[0] if where else None)


def json_response(content: dict[str, Any], status: int = 200) -> Response:
    """Return an answer of JSON."""
    return Response(json.dumps(content).encode(), status, media_type="application/json")
