"""The server of an encoder: its engine thread, which reads up to 64 texts a turn, and its endpoints."""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Literal, TypeVar
from uuid import uuid4

import numpy as np
from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from shardmill import machine
from shardmill.errors import EngineGoneError, ProgramError, ShardmillError
from shardmill.runtime.label import Reader, as_object, classify, embed, label_all, rank, redacted
from shardmill.serve.app import add_error_shape, add_pages, json_response
from shardmill.serve.http import admitted
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Settings
from shardmill.serve.prepare import check_model_name
from shardmill.serve.protocol import MOST_TEXTS, ApiError, Strict, broken, client_gone, invalid, shutting_down, too_busy
from shardmill.serve.stream import while_connected

log = logging.getLogger(__name__)
T = TypeVar("T")


class EncoderWorker:
    """An encoder's worker: the thread that owns the engine, and the queue before it.

    Attributes:
        stop: ends the server; called if the engine can't be used any more.
        error: why the engine can't be used.
    """

    def __init__(self, metrics: Metrics, queue: int) -> None:
        self._turns: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="reader", daemon=True)  # ends with the process
        self._metrics, self._most, self._waiting, self._open = metrics, queue + 1, 0, True
        self._ended, self._over = threading.Event(), threading.Event()
        self.stop: Callable[[], None] = lambda: None
        self.error: Exception | None = None
        self._thread.start()

    @property
    def is_well(self) -> bool:
        """Return whether requests are accepted."""
        return self._open

    async def take(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine thread in arrival order and return its result.

        If nobody waits for the result any more, the work stops after the current pass.

        Raises:
            ApiError: the queue is full, or the server ends.
        """
        if not self._open:
            raise shutting_down()
        if self._waiting >= self._most:
            raise too_busy(f"{self._most - 1} requests wait already; try again later", 1)
        over = threading.Event()

        def turn() -> T:
            self._over = over
            return work()

        self._waiting += 1
        self._metrics.queued.set(max(self._waiting - 1, 0))
        try:
            with self._metrics.request_seconds.time():
                result: Future[T] = Future()
                self._turns.put((result, turn))
                return await asyncio.wrap_future(result)
        except EngineGoneError as error:
            self.give_up(error)
            raise broken() from error
        finally:
            over.set()
            self._waiting -= 1
            self._metrics.queued.set(max(self._waiting - 1, 0))

    def _work(self) -> None:
        while (turn := self._turns.get()) is not None:
            result, work = turn
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work())
                except BaseException as error:  # of a model that has failed
                    result.set_exception(error)

    def start(self) -> None:
        """Do nothing: the thread waits for work since it was made."""

    def give_up(self, error: Exception) -> None:
        """End the server, since the engine can't be used any more."""
        if self._open:
            self.error = error
            self.refuse()
            self.stop()

    def refuse(self) -> None:
        """Accept no more requests."""
        self._open = False

    def check(self) -> None:
        """Raise ApiError if the work must stop; called between passes, since a text may take hundreds."""
        if self._ended.is_set():
            raise shutting_down()
        if self._over.is_set():
            raise client_gone()

    def cancel_running(self) -> None:
        """Stop the running text after its pass."""
        self._ended.set()

    def close(self, timeout: float) -> None:
        """End the thread after its current pass, and wait at most `timeout` seconds for it: an engine may hang."""
        self.refuse()
        self.cancel_running()
        with suppress(Empty):
            while turn := self._turns.get_nowait():
                turn[0].cancel()
        self._turns.put(None)
        self._thread.join(timeout)


TURN = 64  # texts
Row = TypeVar("Row")
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class LabelRequest(Strict):
    """The body of `POST /v1/label`: one text or several."""

    model: str
    input: str | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
    redact: bool = False


class EmbeddingRequest(Strict):
    """The body of `POST /v1/embeddings`, in OpenAI's form."""

    model: str
    input: Text | Annotated[list[Text] | Tokens | list[Tokens], Field(min_length=1, max_length=MOST_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    user: str | None = None


class Document(Strict):
    """A document as an object."""

    text: Text


class RerankRequest(Strict):
    """The body of `POST /v1/rerank`, in the form of Jina, Cohere and vLLM, with the instruction that a model reads."""

    model: str
    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool = True
    instruction: Text | None = None
    user: str | None = None


def create_encoder_app(reader: Reader, desk: EncoderWorker, metrics: Metrics, settings: Settings) -> ASGIApp:
    """Build the application, behind its admission middleware; `desk` is the engine's thread and its queue."""
    name, reader = reader.encoder.manifest["model"], replace(reader, before_pass=desk.check)
    app = FastAPI(title="shardmill", docs_url=None, redoc_url=None, openapi_url=None)
    add_error_shape(app)
    facts = {"task": reader.task, "engine": machine.engine_name()}
    add_pages(app, name, lambda: desk.is_well, metrics, settings, facts, checked=reader.checked)

    @app.post("/v1/label", response_model=None)
    async def label_texts(body: LabelRequest, request: Request) -> Response:
        """Label the tokens of texts, or whole texts."""
        check_model_name(body.model, name)
        _check_address(reader, name, "/v1/label")
        if body.redact and reader.classifies:
            raise invalid(f"{name} labels whole texts and finds no spans in them: leave out redact", "redact")
        texts = [body.input] if isinstance(body.input, str) else body.input
        work = _answered(desk, lambda some: _read(reader, some, body.redact), texts)
        rows = await while_connected(request.receive, work)
        return json_response(_listed(name, [{"index": i, **row} for i, row in enumerate(rows)], rows))

    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts, as OpenAI's API does."""
        check_model_name(body.model, name)
        _check_address(reader, name, "/v1/embeddings")
        if body.dimensions and body.dimensions > reader.width:
            raise invalid(f"dimensions: {name} gives {reader.width} numbers, {body.dimensions} are asked", "dimensions")
        several = isinstance(body.input, list) and not isinstance(body.input[0], int)  # not the tokens of one text
        inputs = _prompted(reader, body.input if several else [body.input], body.prompt_name)
        work = _answered(desk, partial(_embedded, reader, body.dimensions), inputs)
        embedded = await while_connected(request.receive, work)
        rows = [
            {"object": "embedding", "index": i, "embedding": _spelled(row, body.encoding_format)}
            for i, (row, _) in enumerate(embedded)
        ]
        return json_response(_listed(name, rows, [{"tokens": count} for _, count in embedded]))

    @app.post("/v1/rerank", response_model=None)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Say how well documents meet a query."""
        check_model_name(body.model, name)
        _check_address(reader, name, "/v1/rerank")
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        work = _answered(desk, partial(_ranked, reader, body.query, body.instruction), texts)
        ranked = await while_connected(request.receive, work)
        best = sorted(range(len(ranked)), key=lambda i: -ranked[i][0])[: body.top_n or len(ranked)]
        results = [
            {"index": i, "relevance_score": ranked[i][0]}
            | ({"document": {"text": texts[i]}} if body.return_documents else {})
            for i in best
        ]
        tokens = sum(count for _, count in ranked)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json_response({"id": f"rerank-{uuid4().hex}", "model": name, "results": results, "usage": usage})

    return admitted(app, settings, metrics)


def _check_address(reader: Reader, name: str, address: str) -> None:
    """Raise ApiError if the model answers at another address."""
    right, does = ("/v1/label", "labels texts")
    if reader.embeds:
        right, does = ("/v1/embeddings", "embeds texts")
    elif reader.ranks:
        right, does = ("/v1/rerank", "ranks documents")
    if address != right:
        raise invalid(f"{name} {does}: ask {right}", "model")


def _prompted(reader: Reader, inputs: Sequence[Any], name: str | None) -> Sequence[Any]:
    """Return the inputs with a prompt before each text: the named one, or the checkpoint's default; tokens stay."""
    chosen = name or reader.encoder.manifest.get("default_prompt")
    if chosen is None:
        return inputs
    if chosen not in reader.prompts:
        has = ", ".join(reader.prompts) or "none"
        raise invalid(f"prompt_name: the model has no prompt {chosen!r}; it has {has}", "prompt_name")
    return [reader.prompts[chosen] + text if isinstance(text, str) else text for text in inputs]


async def _answered(desk: EncoderWorker, read: Callable[[Sequence[T]], list[Row]], texts: Sequence[T]) -> list[Row]:
    """Return the results for the texts of a request."""
    turns = (texts[at : at + TURN] for at in range(0, len(texts), TURN))  # other requests may run between them
    return [row for some in turns for row in await desk.take(partial(read, some))]


def _read(reader: Reader, texts: Sequence[str], redact: bool) -> list[dict[str, Any]]:
    """Return the model's labels for texts."""
    _check_unicode(texts)
    with _refused():
        if reader.classifies:
            return [
                {
                    "labels": [{"label": name, "score": share} for name, share in one.labels.items()],
                    "tokens": one.tokens,
                }
                for one in classify(reader, texts)
            ]
        labelled = zip(texts, label_all(reader, texts), strict=True)
        return [
            as_object(text, one) | ({"redacted": redacted(text, one.spans)} if redact else {}) for text, one in labelled
        ]


def _embedded(reader: Reader, dimensions: int | None, texts: Sequence[str | Sequence[int]]) -> list[tuple[Any, int]]:
    """Return the embeddings of texts or of token lists, and the number of tokens of each; see `embed`."""
    _check_unicode([text for text in texts if isinstance(text, str)])
    tokens = [reader.tokenizer.encode(text).ids if isinstance(text, str) else text for text in texts]
    vocab = reader.encoder.manifest["vocab"]
    if any(token >= vocab for text in tokens for token in text):
        raise invalid(f"input: the model has {vocab} tokens", "input")
    with _refused():
        return list(zip(embed(reader, tokens, dimensions), map(len, tokens), strict=True))


def _ranked(reader: Reader, query: str, instruction: str | None, texts: Sequence[str]) -> list[tuple[float, int]]:
    """Return how well documents meet a query, each score with the number of tokens that were read."""
    with _refused():
        return [(one.score, one.tokens) for one in rank(reader, query, texts, instruction)]


@contextmanager
def _refused() -> Iterator[None]:
    """Turn a ShardmillError about the input into the client's error, and one about the program into the server's."""
    try:
        yield
    except ApiError:  # the work was cancelled; the input is not at fault
        raise
    except ProgramError as error:
        log.error("a request failed: %s", error)
        raise broken() from error
    except ShardmillError as error:
        raise invalid(str(error), "input") from error


def _spelled(row: Any, form: str) -> list[float] | str:
    """Return an embedding as numbers, or as base64 of little-endian float32."""
    if form == "float":
        return [float(value) for value in row]
    return base64.b64encode(np.asarray(row, "<f4").tobytes()).decode()


def _listed(name: str, rows: list[dict[str, Any]], counted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return rows in OpenAI's form of a list."""
    tokens = sum(row["tokens"] for row in counted)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": name, "data": rows, "usage": usage}


def _check_unicode(texts: Sequence[str]) -> None:
    """Raise ApiError for half of a surrogate pair, which no tokenizer accepts."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, "the input is not valid Unicode: it contains half of a surrogate pair") from error
