"""The HTTP interface of an encoder: /v1/label, OpenAI's /v1/embeddings, /health and /metrics."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from shardmill.errors import ShardmillError
from shardmill.runtime.label import Reader, as_object, classify, embed, label_all, redacted
from shardmill.serve.errors import ApiError, invalid
from shardmill.serve.gate import Gate
from shardmill.serve.metrics import Metrics
from shardmill.serve.pages import add_error_shape, add_pages, check_name, json_response
from shardmill.serve.reading import Desk
from shardmill.serve.schema import Strict
from shardmill.serve.settings import Settings
from shardmill.serve.stream import while_connected

MOST_TEXTS = 2048
TURN = 64  # texts
T = TypeVar("T")
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
    user: str | None = None


def create_encoder_app(name: str, reader: Reader, desk: Desk, metrics: Metrics, settings: Settings) -> ASGIApp:
    """Build the application, behind its admission middleware (Gate).

    Args:
        name: the model's name for clients.
        reader: the encoder and its tokenizer.
        desk: the queue and the engine's thread.
        metrics: the server's counters.
        settings: the server's settings.
    """
    reader = replace(reader, before_pass=desk.check)
    app = FastAPI(title="shardmill", docs_url=None, redoc_url=None, openapi_url=None)
    add_error_shape(app)
    add_pages(app, name, lambda: desk.is_well, metrics)

    @app.post("/v1/label", response_model=None)
    async def label_texts(body: LabelRequest, request: Request) -> Response:
        check_name(body.model, name)
        if reader.embeds:
            raise invalid(f"{name} embeds texts: ask /v1/embeddings", "model")
        if body.redact and reader.classifies:
            raise invalid(f"{name} labels whole texts and finds no spans in them: leave out redact", "redact")
        texts = [body.input] if isinstance(body.input, str) else body.input
        work = _answered(desk, lambda some: _read(reader, some, body.redact), texts)
        found = await while_connected(request.receive, work)
        return json_response(_listed(name, [{"index": i, **row} for i, row in enumerate(found)], found))

    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        check_name(body.model, name)
        if not reader.embeds:
            raise invalid(f"{name} labels texts: ask /v1/label", "model")
        work = _answered(desk, partial(_embedded, reader), _inputs(body.input))
        found = await while_connected(request.receive, work)
        rows = [
            {"object": "embedding", "index": i, "embedding": _spelled(row, body.encoding_format)}
            for i, (row, _) in enumerate(found)
        ]
        return json_response(_listed(name, rows, [{"tokens": count} for _, count in found]))

    return Gate(app, settings, metrics)


def _inputs(given: Any) -> Sequence[Any]:
    """Return the texts, or lists of tokens, of a request."""
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


async def _answered(desk: Desk, read: Callable[[Sequence[T]], list[Row]], texts: Sequence[T]) -> list[Row]:
    """Return the results for the texts of a request."""
    return [row for some in _turns(texts) for row in await desk.take(partial(read, some))]


def _turns(texts: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split a request's texts into turns; other requests may run between turns."""
    return (texts[at : at + TURN] for at in range(0, len(texts), TURN))


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
        found = zip(texts, label_all(reader, texts), strict=True)
        return [
            as_object(text, one) | ({"redacted": redacted(text, one.spans)} if redact else {}) for text, one in found
        ]


def _embedded(reader: Reader, texts: Sequence[str | Sequence[int]]) -> list[tuple[Any, int]]:
    """Return the embeddings of texts or of token lists, and the number of tokens of each."""
    _check_unicode([text for text in texts if isinstance(text, str)])
    tokens = [reader.tokenizer.encode(text).ids if isinstance(text, str) else text for text in texts]
    vocab = reader.encoder.manifest["vocab"]
    if any(token >= vocab for text in tokens for token in text):
        raise invalid(f"input: the model has {vocab} tokens", "input")
    with _refused():
        return list(zip(embed(reader, tokens), map(len, tokens), strict=True))


@contextmanager
def _refused() -> Iterator[None]:
    """Turn a ShardmillError about the input into the client's error."""
    try:
        yield
    except ApiError:  # the work was cancelled; the input is not at fault
        raise
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
