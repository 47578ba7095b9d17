"""The HTTP interface: OpenAI's endpoints, /health and /metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from drafted_decoding import LabelScores
from drafted_decoding.drafters import BY_ITSELF, DRAFT_MODEL
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from shardmill.serve.answer import Answer
from shardmill.serve.decide import DecideRequest, decided
from shardmill.serve.engine_worker import Worker
from shardmill.serve.http import admitted, respond
from shardmill.serve.jobs import Job, Work
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model, Settings
from shardmill.serve.pages import add_browser_pages
from shardmill.serve.prepare import check_model_name, decided_chat, prepare, prepare_decisions, split_into_tokens
from shardmill.serve.protocol import ApiError, ClientGoneError, Strict, broken, client_gone, first_complaint, invalid
from shardmill.serve.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from shardmill.serve.responses import ResponsesRequest
from shardmill.serve.responses_answer import ResponsesAnswer
from shardmill.serve.stream import EventStream, take_all, while_connected
from shardmill.serve.transcribe import add_transcriptions


def add_pages(
    app: FastAPI,
    model_name: str,
    is_well: Callable[[], bool],
    metrics: Metrics,
    settings: Settings,
    facts: Mapping[str, Any],
    adapters: Callable[[], Sequence[str]] = tuple,
    checked: str = "",
) -> None:
    """Add the pages that every server has.

    Args:
        app: the application.
        model_name: the model's name for clients.
        is_well: returns whether requests are accepted.
        metrics: the counters for /metrics.
        settings: the server's settings.
        facts: what the page to chat with must know of the model: `task`, `engine`, and for a decoder more.
        adapters: returns the names of the model's adapters.
        checked: what `shardmill check` found on this machine, for /health; empty for nothing.
    """
    add_browser_pages(app, locked=settings.api_key is not None)
    get = partial(app.api_route, methods=["GET", "HEAD"], response_model=None)
    card = {"id": model_name, "object": "model", "created": int(time.time()), "owned_by": "shardmill"}
    card |= {"shardmill": facts}

    @get("/v1/models")
    @get("/v1/models/", include_in_schema=False)
    async def models() -> Response:
        """Name the model and its adapters, and say what the model does."""
        others = [{**card, "id": f"{model_name}:{name}", "parent": model_name} for name in adapters()]
        return json_response({"object": "list", "data": [card, *others]})

    @get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """Name one of these, and say what it does."""
        adapted = check_model_name(name, model_name, adapters()) is not None
        return json_response({**card, "id": name, "parent": model_name} if adapted else card)

    @get("/health")
    async def health() -> Response:
        """Say whether requests are answered, or how far the model is loaded."""
        state = ({"ungated": [*settings.ungated]} if settings.ungated else {}) | ({"check": checked} if checked else {})
        return json_response({"status": "ok" if is_well() else "unavailable", **state}, 200 if is_well() else 503)

    @get("/metrics")
    async def metrics_page() -> Response:
        """Count requests, tokens and passes for Prometheus."""
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
        return respond(first_complaint(error.errors(), 1))

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


def json_response(content: dict[str, Any], status: int = 200) -> Response:
    """Return an answer of JSON."""
    return Response(json.dumps(content).encode(), status, media_type="application/json")


def _asker(body: Strict, request: Request) -> str:
    """Return who asks: the key with the user that the request names, one of both alone, or else the connection.

    OpenAI has an older and a newer field for the user.
    """
    named = body.__pydantic_extra__ or {}
    key, user = request.headers.get("authorization", ""), named.get("safety_identifier") or named.get("user")
    return f"{key} user {user}" if user else key or f"connection {request.client}"


def _add_decisions(app: FastAPI, chats: Executor, model: Model, worker: Worker, settings: Settings) -> None:
    """Add `POST /v1/decide`."""
    splitting = ThreadPoolExecutor(1, "labels")

    @app.post("/v1/decide", response_model=None)
    async def decide(body: DecideRequest, request: Request) -> Response:
        """Give the probabilities of labels after a text or a conversation."""
        scores = await while_connected(request.receive, scored(body, _asker(body, request)))
        return json_response(decided(body.model, body.labels, scores, model.calibration))

    async def scored(body: DecideRequest, client: str) -> list[LabelScores]:
        """Run a request's texts one by one, so that other requests may run between them.

        A text is tokenised once for each label, which takes long for many. So it is done at the text's turn, after the
        queue has been asked, and in a thread of its own, which no other request needs. It ends when the client leaves.
        """
        loop, gone, scores = asyncio.get_running_loop(), threading.Event(), list[LabelScores]()
        try:
            worker.check_room()
            chat = await loop.run_in_executor(chats, decided_chat, body, model) if body.messages else ""
            works = prepare_decisions(body, chat, model, settings, gone.is_set)
            while (work := await loop.run_in_executor(splitting, next, works, None)) is not None:
                scores.append(await score(Job(work, client), follows=bool(scores)))
            return scores
        finally:
            gone.set()

    async def score(job: Job, follows: bool) -> LabelScores:
        try:
            worker.submit(job, follows=follows)
            *_, last = await take_all(job)
        except asyncio.CancelledError:
            worker.cancel(job, client_gone())
            raise
        if isinstance(last, ApiError):
            raise last
        assert isinstance(last, LabelScores)
        return last


def _add_tokenizer(app: FastAPI, chats: Executor, model: Model, settings: Settings) -> None:
    """Add `POST /tokenize` and `POST /detokenize`, as vLLM has them, and OpenAI's count of an input's tokens."""

    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Split a text or a conversation into tokens."""
        threads = chats if body.messages else None
        tokens = await asyncio.get_running_loop().run_in_executor(threads, split_into_tokens, body, model)
        texts = [model.vocabulary.text(token) for token in tokens] if body.return_token_strs else None
        most = model.engine.slots
        return json_response({"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": texts})

    @app.post("/v1/responses/input_tokens", response_model=None)
    async def input_tokens(body: ResponsesRequest) -> Response:
        """Count the tokens of such a conversation, without an answer."""
        works = await asyncio.get_running_loop().run_in_executor(chats, prepare, body.as_chat(), model, settings)
        return json_response({"object": "response.input_tokens", "input_tokens": len(works[0].prompt)})

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of tokens, special tokens included."""
        check_model_name(body.model or model.name, model.name, model.adapters())
        known = model.tokenizer.get_vocab_size(with_added_tokens=True)
        if stray := [token for token in body.tokens if token >= known]:
            raise invalid(f"tokens: {stray[0]} is no token: the vocabulary has {known}", "tokens")
        decode = partial(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": await asyncio.get_running_loop().run_in_executor(None, decode)})


def _facts(model: Model, settings: Settings) -> dict[str, Any]:
    """Return what the page to chat with must know of a decoder."""
    known = [name for name in BY_ITSELF if name != settings.drafter]
    known += [model.head_name] if model.head_name else []
    known += [DRAFT_MODEL] if model.draft_session is not None else []
    return {
        "task": "completion" if model.template is None else "chat",
        "engine": model.engine_name,
        "context": model.engine.slots,
        "drafters": list(dict.fromkeys([settings.drafter, *known])),  # the usual one first
        "calls": model.tools is not None,
        "variables": sorted(model.template_variables),
        "images": model.pictures.most if model.pictures and settings.context_policy != "slide" else 0,
    }


def create_app(model: Model, worker: Worker, metrics: Metrics, settings: Settings) -> ASGIApp:
    """Build the application, behind its admission middleware."""
    app = FastAPI(title="shardmill", docs_url=None, redoc_url=None, openapi_url=None)
    chats = ThreadPoolExecutor(1, "chat")  # conversations are rendered one by one: waiting ones delay no others
    add_error_shape(app)
    facts = _facts(model, settings)
    add_pages(app, model.name, lambda: worker.is_well, metrics, settings, facts, model.adapters, model.checked)
    _add_decisions(app, chats, model, worker, settings)
    _add_tokenizer(app, chats, model, settings)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, as OpenAI's API does."""
        return await answer(body, request, None, partial(Answer, body, model))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, as OpenAI's API does."""
        return await answer(body, request, chats, partial(Answer, body, model))

    @app.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's Responses API, without stored answers."""
        chat = body.as_chat(media={"images": model.pictures, "audio": model.sounds})
        make = partial(ResponsesAnswer, body, chat, model)
        response = await answer(chat, request, chats, make, _asker(body, request))
        response.headers.update(body.headers)
        return response

    async def answer(
        body: CompletionRequest | ChatRequest,
        request: Request,
        threads: Executor | None,
        make: Callable[..., Answer | ResponsesAnswer],
        client: str | None = None,
    ) -> Response:
        """Run a request. Checks and the queue come before the answer, so a refused stream has an error status."""

        async def prepared() -> list[Work]:
            return await asyncio.get_running_loop().run_in_executor(threads, prepare, body, model, settings)

        client = client or _asker(body, request)
        works = await while_connected(request.receive, prepared())
        form, jobs = make(works), [Job(work, client) for work in works]
        try:
            for job in jobs:
                worker.submit(job)
            if body.stream:
                return EventStream(form, jobs, worker, settings.limits)
            answers = []
            for job in jobs:
                answers.append(await while_connected(request.receive, take_all(job)))
                if isinstance(error := answers[-1][-1], ApiError):
                    raise error
        except BaseException:
            for job in jobs:
                worker.cancel(job, client_gone())
            raise
        return json_response(form.whole(answers))

    add_transcriptions(app, model, partial(answer, threads=chats))
    return admitted(app, settings, metrics)
