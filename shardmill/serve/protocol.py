"""OpenAI's protocol: the fields of requests, and errors in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardmill.decode import DRAFTERS
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


MOST_STOPS = 16
NO_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "parallel_tool_calls"}
)  # fmt: skip
LONGEST_STOP = 256
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
EITHER = {  # fields that accept several types, for which pydantic would report the first type only
    "prompt": "must be one text or one list of tokens",
    "stop": f"must be a text of 1 to {LONGEST_STOP} characters or a list of at most {MOST_STOPS} such texts",
    "content": "must be a text or a list of parts of type text",
    "input": "must be a text or a list of texts, of tokens or of lists of tokens",
}


class Strict(BaseModel):
    """A model that rejects unknown fields, unless they are empty or have no effect."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    accepted: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Strict:
        for name, value in (self.__pydantic_extra__ or {}).items():
            if name not in self.accepted and value not in (None, [], {}, ""):
                raise ValueError(f"{name!r} is not supported: leave it out")
        return self


class Extension(Strict):
    """The object `"shardmill": {...}`: options that OpenAI's interface lacks."""

    drafter: Literal[DRAFTERS] | None = None  # type: ignore[valid-type]
    private: bool = False
    figures: bool = False
    accept_top_p: float | None = Field(default=None, gt=0, le=1)


class StreamOptions(Strict):
    """The object `stream_options`."""

    accepted = frozenset({"include_obfuscation"})
    include_usage: bool = False


class JsonSchemaFormat(Strict):
    """The object `response_format.json_schema`."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The object `response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs json_schema.schema")
        return self


class GenerationRequest(Strict):
    """The fields of both kinds of requests."""

    accepted = NO_EFFECT
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    shardmill: Extension = Field(default_factory=Extension)

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: str | list[int] | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None

    @property
    def top(self) -> int | None:
        """Return how many of the likeliest tokens to report; None for no log-probabilities."""
        return self.logprobs


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """A message; its content may have several parts, if all are text."""

    accepted = frozenset({"annotations"})  # a field of answers, present when a client sends an answer back
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def as_template_input(self) -> dict[str, str]:
        """Return role and text; `developer` is the newer name of `system`, which templates don't know."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: Literal["none"] | None = None

    @property
    def top(self) -> int | None:
        """Return how many of the likeliest tokens to report; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
