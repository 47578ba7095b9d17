"""The HTTP interface: OpenAI's endpoints, /health and /metrics."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from shardmill.serve.answer import Answer
from shardmill.serve.errors import broken, client_gone
from shardmill.serve.gate import Gate
from shardmill.serve.job import Done, Job, Work, ending
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model
from shardmill.serve.pages import add_error_shape, add_pages, json_response
from shardmill.serve.prepare import prepare
from shardmill.serve.schema import ChatRequest, CompletionRequest
from shardmill.serve.settings import Settings
from shardmill.serve.stream import EventStream, take_all, while_connected
from shardmill.serve.worker import Worker


def create_app(model: Model, worker: Worker, metrics: Metrics, settings: Settings) -> ASGIApp:
    """Build the application, behind its admission middleware (Gate)."""
    app = FastAPI(title="shardmill", docs_url=None, redoc_url=None, openapi_url=None)
    chats = ThreadPoolExecutor(1, "chat")  # conversations are rendered one by one: waiting ones delay no others
    add_error_shape(app)
    add_pages(app, model.name, lambda: worker.is_well, metrics)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(body, request, model, worker, settings, None)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(body, request, model, worker, settings, chats)

    return Gate(app, settings, metrics)


async def answer(
    body: CompletionRequest | ChatRequest,
    request: Request,
    model: Model,
    worker: Worker,
    settings: Settings,
    threads: Executor | None,
) -> Response:
    """Run a request. Checks and the queue come before the answer, so a refused stream has an error status.

    Args:
        body: the parsed request.
        request: its connection.
        model: the model to run.
        worker: the engine's queue.
        settings: the server's settings.
        threads: threads for preparing the request; None for the shared default.
    """

    async def prepared() -> Work:
        return await asyncio.get_running_loop().run_in_executor(threads, prepare, body, model, settings)

    work = await while_connected(request.receive, prepared())
    job, form = Job(work), Answer(body, model)
    worker.submit(job)
    if body.stream:
        return EventStream(form, job, worker, settings.limits)
    try:
        items = await while_connected(request.receive, take_all(job))
    except BaseException:
        worker.cancel(job, client_gone())
        raise
    end = ending(items)
    if isinstance(end, Done):
        return json_response(form.whole(items, end))
    raise end or broken()
