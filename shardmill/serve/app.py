"""The HTTP interface: OpenAI's, /health and /metrics."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from shardmill.serve.answer import Answer
from shardmill.serve.errors import ApiError, ClientGoneError, broken, client_gone, invalid
from shardmill.serve.gate import Gate, respond
from shardmill.serve.job import Done, Job, ending
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model
from shardmill.serve.prepare import check_model, prepare
from shardmill.serve.schema import EITHER, ChatRequest, CompletionRequest
from shardmill.serve.settings import Settings
from shardmill.serve.stream import EventStream, take_all, while_connected
from shardmill.serve.worker import Worker


def create_app(model: Model, worker: Worker, metrics: Metrics, settings: Settings) -> ASGIApp:
    """The application, behind its gate."""
    app = FastAPI(title="shardmill", docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_shape(app)
    _add_pages(app, model, worker, metrics)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(body, request, model, worker, settings)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(body, request, model, worker, settings)

    return Gate(app, settings, metrics)


async def answer(
    body: CompletionRequest | ChatRequest, request: Request, model: Model, worker: Worker, settings: Settings
) -> Response:
    """Runs a request. The status is sent with its first token, so that an earlier failure still gets its own status."""
    work = await asyncio.to_thread(prepare, body, model, settings)
    job, form = Job(work), Answer(body, model)
    worker.submit(job)
    try:
        items = await while_connected(request.receive, job.take())
        end = ending(items)
        if isinstance(end, ApiError) and len(items) == 1:
            raise end
        if body.stream:
            return EventStream(form, job, items, worker, settings.limits.stall_seconds)
        items = await while_connected(request.receive, take_all(job, items))
    except BaseException:
        worker.cancel(job, client_gone())
        raise
    end = ending(items)
    if isinstance(end, Done):
        return _json(form.whole(items, end))
    raise end or broken()


def _add_pages(app: FastAPI, model: Model, worker: Worker, metrics: Metrics) -> None:
    card = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "shardmill"}

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> Response:
        check_model(name, model)
        return _json(card)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        return _json({"status": "ok"}) if worker.is_well else _json({"status": "unavailable"}, 503)

    @app.get("/metrics", response_model=None)
    async def metrics_page() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_error_shape(app: FastAPI) -> None:
    """Gives every error OpenAI's form."""

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
    """Describes the first thing that is wrong, in one line."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return invalid(f"the request's body is no JSON: {first['ctx']['error']}")
    if not where and first["type"] in ("missing", "model_attributes_type"):
        return invalid("the request's body must be a JSON object, sent as Content-Type: application/json")
    message = first["msg"].removeprefix("Value error, ")
    for place, field in enumerate(where[:-1]):
        if field in EITHER:
            message, where = EITHER[field], where[: place + 1]
            break
    return invalid(f"{'.'.join(where)}: {message}" if where else message, where[0] if where else None)


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content).encode(), status, media_type="application/json")
