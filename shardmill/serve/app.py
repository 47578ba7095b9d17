"""The HTTP interface: OpenAI's endpoints, /health and /metrics."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from shardmill.decode import SEEDS, Constraint, DecodeError, Grammar, JsonSchema, LabelScores, Options, Sampling
from shardmill.decode.drafters import TRAINED
from shardmill.serve.answer import Answer
from shardmill.serve.decide import DecideRequest, decided, place_of, split_labels
from shardmill.serve.engine_worker import DecideWork, Job, Work, Worker
from shardmill.serve.http import AdmissionMiddleware, respond
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model, Settings
from shardmill.serve.protocol import (
    ApiError,
    ChatRequest,
    ClientGoneError,
    CompletionRequest,
    GenerationRequest,
    NamedTool,
    Strict,
    broken,
    client_gone,
    first_complaint,
    invalid,
)
from shardmill.serve.responses import ResponsesAnswer, ResponsesRequest
from shardmill.serve.stream import EventStream, take_all, while_connected
from shardmill.serve.tool_grammar import write_grammar
from shardmill.serve.tools import FORMATS


def check_model_name(name: str, own: str, adapters: Sequence[str] = ()) -> str | None:
    """Return the adapter that a model's name asks for, as vLLM spells it: MODEL:ADAPTER; None for the bare model.

    Raises:
        ApiError: 404 for any other model than the served one, or another adapter than those of the model.
    """
    model, _, adapter = name.partition(":")
    if model != own or (adapter not in adapters if ":" in name else False):
        served = " and ".join(map(repr, [own, *(f"{own}:{one}" for one in adapters)]))
        message = f"the model {name!r} is not served here; {served} {'are' if adapters else 'is'}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return adapter or None


def add_pages(
    app: FastAPI,
    own: str,
    is_well: Callable[[], bool],
    metrics: Metrics,
    adapters: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Add the pages that every server has.

    Args:
        app: the application.
        own: the model's name for clients.
        is_well: returns whether requests are accepted.
        metrics: the counters for /metrics.
        adapters: returns the names of the model's adapters.
    """
    card = {"id": own, "object": "model", "created": int(time.time()), "owned_by": "shardmill"}

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        others = [{**card, "id": f"{own}:{name}", "parent": own} for name in adapters()]
        return json_response({"object": "list", "data": [card, *others]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> Response:
        adapted = check_model_name(name, own, adapters()) is not None
        return json_response({**card, "id": name, "parent": own} if adapted else card)

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


COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


def _prepare(request: CompletionRequest | ChatRequest, model: Model, settings: Settings) -> list[Work]:
    """Check a request against the model and the limits, and return the engine's work, one for each choice.

    The choices differ by their seeds, which count up from the request's.

    Raises:
        ApiError: the request can't be honoured.
    """
    adapter = check_model_name(request.model, model.name, model.adapters())
    prompt = _chat_prompt(request, model) if isinstance(request, ChatRequest) else _text_prompt(request, model)
    room = _check_prompt(prompt, model, settings)
    drafter = request.shardmill.drafter or settings.drafter
    if drafter == "draft_model" and model.draft_session is None:
        raise invalid("drafter draft_model needs a server started with --draft-build", "shardmill.drafter")
    if drafter in TRAINED and model.head_name != drafter:
        why = f"drafter {drafter} needs a build with an {TRAINED[drafter]}, which this one lacks"
        raise invalid(why, "shardmill.drafter")
    calls = isinstance(request, ChatRequest) and bool(request.functions)
    try:
        sampling = _sampling(request, model)
        sampling.check_vocab(model.engine.vocab)
        options = [
            Options(
                sampling=replace(sampling, seed=(sampling.seed + i) % SEEDS),
                detokenize=model.decoder(model.tools.tokens) if calls and model.tools else model.decode,
                stop=request.stops,
                constraint=_constraint(request, model, prompt),
                top_logprobs=request.top,
                guard_margin=settings.guard_margin,
                private=request.shardmill.private,
            )
            for i in range(request.n or 1)
        ]
    except DecodeError as error:
        raise invalid(str(error)) from error
    most = _max_tokens(request, room, settings)
    return [Work(tuple(prompt), most, drafter, one, adapter) for one in options]


def _text_prompt(request: CompletionRequest, model: Model) -> Sequence[int]:
    """Return the tokens of a text to continue; a prompt may already be tokens."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return model.encode(prompt)
    if isinstance(prompt[0] if prompt else 0, str):
        return model.encode(str(prompt[0]))
    return [int(token) for token in prompt]


def _chat_prompt(request: ChatRequest, model: Model) -> Sequence[int]:
    """Return the tokens of a conversation."""
    return model.encode(_chat_text(request, model), special=False)


def _chat_text(request: ChatRequest, model: Model) -> str:
    """Return a conversation as text, rendered by its template, which also writes the beginning-of-text token."""
    if model.template is None:
        raise invalid(f"{model.name!r} has no chat template: use /v1/completions", code="no_chat_template")
    if request.functions and model.tools is None:
        known = ", ".join(form.name for form in FORMATS)
        message = f"the chat template of {model.name!r} teaches no calls in a known format ({known}): leave out tools"
        raise invalid(message, "tools")
    tools = [tool.as_template_input() for tool in request.tools or ()] if request.functions else []
    try:
        return model.template(request.conversation(), tools) if tools else model.template(request.conversation())
    except Exception as error:  # templates may raise any exception
        raise invalid(f"the chat template refused the messages: {error}", "messages") from error


def _check_prompt(prompt: Sequence[int], model: Model, settings: Settings) -> int:
    """Raise ApiError for a prompt that is empty, too long or of another vocabulary.

    Returns:
        The most tokens to generate: one more than fit, so that an answer that fills the context reports it.
    """
    if not prompt:
        raise invalid("the prompt is empty: give at least one token", "prompt")
    slots = model.engine.slots
    slides = settings.context_policy == "slide"
    most = settings.limits.prompt_tokens or slots
    if not slides:
        most = min(slots, most)
    if len(prompt) > most:
        message = f"the prompt has {len(prompt)} tokens, at most {most} are allowed: shorten it"
        raise invalid(message, code="context_length_exceeded")
    if not all(0 <= token < model.engine.vocab for token in prompt):
        raise invalid(f"the prompt holds a token outside the vocabulary of {model.engine.vocab}", "prompt")
    if slides:
        return settings.limits.max_tokens or slots
    return slots - len(prompt) + 2  # the last token needs no slot


def _max_tokens(request: CompletionRequest | ChatRequest, room: int, settings: Settings) -> int:
    wanted = request.max_tokens
    if isinstance(request, ChatRequest):
        wanted = request.max_completion_tokens or wanted or room
    wanted = wanted or COMPLETION_TOKENS
    most = settings.limits.max_tokens or (room if settings.context_policy == "slide" else None)
    if most is None or wanted <= most:
        return min(wanted, room)
    if request.max_tokens is None and getattr(request, "max_completion_tokens", None) is None:
        return min(most, room)
    raise invalid(f"max_tokens is {wanted}, at most {most} are allowed", "max_tokens")


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _sampling(request: GenerationRequest, model: Model) -> Sampling:
    """Return the request's sampling options.

    What it does not name is the model's if it names no temperature, otherwise OpenAI's default.
    """
    names = ("temperature", "top_k", "top_p", "min_p", *PENALTIES)
    named = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    usual = model.sampling if request.temperature is None else {}
    return Sampling(
        **({"temperature": 1.0} | dict(usual) | named),
        seed=secrets.randbits(63) if request.seed is None else request.seed % SEEDS,
        logit_bias=request.logit_bias or {},
        accept_top_p=request.shardmill.accept_top_p,
    )


def _constraint(request: CompletionRequest | ChatRequest, model: Model, prompt: Sequence[int]) -> Constraint | None:
    """Return the grammar that an answer must obey; None if it may be any text."""
    wanted = request.response_format
    schema: dict[str, Any] | None = None
    if wanted is not None and wanted.type != "text":
        schema = wanted.json_schema.schema_ if wanted.json_schema else {"type": "object"}
    functions = request.functions if isinstance(request, ChatRequest) else []
    named = isinstance(request, ChatRequest) and isinstance(request.tool_choice, NamedTool)
    required = named or (isinstance(request, ChatRequest) and request.tool_choice == "required")
    calls = bool(functions) and (required or schema is not None or any(function.strict for function in functions))
    if schema is None and not calls:
        return None
    if not model.eos:
        what = "response_format" if schema is not None else "tools"
        raise invalid(f"{what} needs a model with an end-of-text token", what)
    tokenizer = model.grammar_tokenizer()
    if not calls or model.tools is None or not isinstance(request, ChatRequest):
        return JsonSchema(schema or {}, tokenizer)
    if isinstance(request.tool_choice, NamedTool):
        functions = [one for one in functions if one.name == request.tool_choice.function.name]
    grammar = write_grammar(
        model.tools,
        functions,
        tokenizer.special,
        required=required,
        parallel=not named and request.parallel_tool_calls is not False,
        answer=schema,
        thinks=model.decoder(("<think>",))(prompt[-4:]).rstrip().endswith("<think>"),
    )
    return Grammar(grammar, tokenizer)


def _asker(body: Strict, request: Request) -> str:
    """Return who asks: the user that the request names, in OpenAI's older or newer field, otherwise the connection."""
    named = body.__pydantic_extra__ or {}
    user = named.get("safety_identifier") or named.get("user")
    return f"user {user}" if user else f"connection {request.client}"


def _prepare_decisions(request: DecideRequest, model: Model, settings: Settings) -> list[DecideWork]:
    """Check a request against the model and the limits, and return the engine's work, one for each text.

    Raises:
        ApiError: the request can't be honoured.
    """
    adapter = check_model_name(request.model, model.name, model.adapters())
    most = min(model.engine.slots, settings.limits.prompt_tokens or model.engine.slots)
    if request.messages is not None:
        text = _chat_text(request.as_chat(), model)
        return [replace(split_labels(model, text, request.labels, special=False, most=most), adapter=adapter)]
    found: list[DecideWork] = []
    for i, text in enumerate(request.texts):
        try:
            found.append(split_labels(model, text, request.labels, special=True, most=most))
        except ApiError as error:
            raise (error if isinstance(request.input, str) else place_of(error, i)) from error
    return [replace(work, adapter=adapter) for work in found]


def _add_decisions(app: FastAPI, chats: Executor, model: Model, worker: Worker, settings: Settings) -> None:
    """Add `POST /v1/decide`."""

    @app.post("/v1/decide", response_model=None)
    async def decide(body: DecideRequest, request: Request) -> Response:
        found = await while_connected(request.receive, scored(body, _asker(body, request)))
        return json_response(decided(body.model, body.labels, found, model.calibration))

    async def scored(body: DecideRequest, client: str) -> list[LabelScores]:
        """Run a request's texts one by one, so that other requests may run between them."""
        threads, loop = chats if body.messages else None, asyncio.get_running_loop()
        found: list[LabelScores] = []
        for work in await loop.run_in_executor(threads, _prepare_decisions, body, model, settings):
            job = Job(work, client)
            try:
                worker.submit(job, follows=bool(found))
                *_, last = await take_all(job)
            except asyncio.CancelledError:
                worker.cancel(job, client_gone())
                raise
            if isinstance(last, ApiError):
                raise last
            assert isinstance(last, LabelScores)
            found.append(last)
        return found


def create_app(model: Model, worker: Worker, metrics: Metrics, settings: Settings) -> ASGIApp:
    """Build the application, behind its admission middleware."""
    app = FastAPI(title="shardmill", docs_url=None, redoc_url=None, openapi_url=None)
    chats = ThreadPoolExecutor(1, "chat")  # conversations are rendered one by one: waiting ones delay no others
    add_error_shape(app)
    add_pages(app, model.name, lambda: worker.is_well, metrics, model.adapters)
    _add_decisions(app, chats, model, worker, settings)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(body, request, None, Answer(body, model))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(body, request, chats, Answer(body, model))

    @app.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        chat = body.as_chat()
        return await answer(chat, request, chats, ResponsesAnswer(body, chat, model), _asker(body, request))

    async def answer(
        body: CompletionRequest | ChatRequest,
        request: Request,
        threads: Executor | None,
        form: Answer | ResponsesAnswer,
        client: str | None = None,
    ) -> Response:
        """Run a request. Checks and the queue come before the answer, so a refused stream has an error status."""

        async def prepared() -> list[Work]:
            return await asyncio.get_running_loop().run_in_executor(threads, _prepare, body, model, settings)

        client = client or _asker(body, request)
        jobs = [Job(work, client) for work in await while_connected(request.receive, prepared())]
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

    return AdmissionMiddleware(app, settings, metrics)
