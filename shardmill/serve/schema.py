"""Requests in OpenAI's form. A field that can't be honoured is rejected by name, never ignored.

Fields that can't change an answer (such as user and billing fields) are accepted and not used.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardmill.decode import DRAFTERS

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


class Request(Strict):
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


class CompletionRequest(Request):
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


class ChatRequest(Request):
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
