"""OpenAI's protocol: the fields of requests, and errors in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from drafted_decoding import DRAFTERS
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from shardmill.errors import ShardmillError
from shardmill.files import parse_json
from shardmill.printable import one_line
from shardmill.serve.thoughts import thought_fields
from shardmill.templates.render import NO_PARAMETERS


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


MOST_TEXTS = 2048  # of a request to label, embed, rank or decide
MOST_STOPS = 16
MOST_CHOICES = 16  # each waits in the queue like a request
MOST_PROMPTS = 32  # likewise
MOST_TOOLS = 128
NO_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]  # how long a model thinks, in OpenAI's words
LONGEST_STOP = 256
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
EITHER = {  # fields that accept several types, for which pydantic would report the first type only
    "prompt": f"must be a text, a list of tokens, or a list of 1 to {MOST_PROMPTS} such prompts",
    "stop": f"must be a text of 1 to {LONGEST_STOP} characters or a list of at most {MOST_STOPS} such texts",
    "content": "must be a text or a list of parts of type text",
    "input": f"must be a text or a list of at most {MOST_TEXTS} texts, and no text may be empty; "
    "/v1/embeddings takes tokens, too",
    "tool_choice": 'must be none, auto, required or {"type": "function", "function": {"name": NAME}}',
}


def first_complaint(errors: Sequence[Any], skipped: int = 0) -> ApiError:
    """Return an error for the first invalid field, in one line.

    Args:
        errors: pydantic's errors.
        skipped: parts at the beginning of each field's place that are not the request's.
    """
    first = errors[0]
    where = [str(part) for part in first["loc"][skipped:]]
    if first["type"] == "json_invalid":
        return invalid(f"the request's body is not JSON: {first['ctx']['error']}")
    if not where and first["type"] in ("missing", "model_attributes_type"):
        return invalid("the request's body must be a JSON object, sent as Content-Type: application/json")
    message = first["msg"].removeprefix("Value error, ")
    for place, field in enumerate(where[:-1]):
        if field in EITHER and not where[place + 1].isdigit():
            message, where = EITHER[field], where[: place + 1]
            break
    return invalid(f"{'.'.join(where)}: {message}" if where else message, where[0] if where else None)


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
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    shardmill: Extension = Field(default_factory=Extension)

    @model_validator(mode="after")
    def _streams_if_it_says_how(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        """Return how many choices the answer has."""
        return self.n or 1


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: str | list[int] | Annotated[list[str] | list[list[int]], Field(min_length=1, max_length=MOST_PROMPTS)]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts. Each prompt has its own choices."""
        if isinstance(self.prompt, str) or not isinstance(self.prompt[0] if self.prompt else 0, str | list):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def choices(self) -> int:
        """See `GenerationRequest`."""
        return len(self.prompts) * (self.n or 1)

    @property
    def top(self) -> int | None:
        """Return how many of the likeliest tokens to report; None for no log-probabilities."""
        return self.logprobs


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class FunctionDefinition(Strict):
    """The object `function` of a tool."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def as_template_input(self) -> dict[str, Any]:
        """Return the tool as templates expect it; `strict` is not the model's to know."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": function | {"parameters": self.function.parameters or NO_PARAMETERS}}


class CalledFunction(Strict):
    """The object `function` of a call, or of a tool choice."""

    accepted = frozenset({"parsed_arguments"})  # the client's own, when a parsed answer is sent back
    name: str
    arguments: str = "{}"

    def as_template_input(self) -> dict[str, Any]:
        """Return the call with its arguments as an object; any other text stays, as the model wrote it."""
        try:
            arguments = parse_json(self.arguments or "{}")
        except ValueError:
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(Strict):
    """A call in an assistant's message."""

    accepted = frozenset({"index"})  # of a streamed call
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedTool(Strict):
    """A tool choice that names a function."""

    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Strict):
    """A message; its content may have several parts, if all are text."""

    accepted = frozenset({"annotations", "parsed"})  # fields of answers, present when a client sends an answer back
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} can't have tool_calls")
        if self.content is None and not (self.tool_calls or self.thought):
            raise ValueError("content is missing: only a message with tool_calls or a thought may leave it out")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role tool needs the tool_call_id of the call that it answers")
        return self

    @property
    def thought(self) -> str | None:
        """Return the thought before an earlier answer, under its older or newer name."""
        return self.reasoning_content or self.reasoning

    def as_template_input(self) -> dict[str, Any]:
        """Return the message as templates expect it; `developer` is the newer name of `system`, unknown to them."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            calls = [{"id": c.id, "type": c.type, "function": c.function.as_template_input()} for c in self.tool_calls]
            message["tool_calls"] = calls
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        return message | thought_fields(self.thought)


def _checked_variables(given: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a template's variables. A template would take the text "false" for true."""
    for name in ("enable_thinking", "thinking"):
        if not isinstance(given.get(name, True), bool):
            raise ValueError(f"{name} must be true or false")
    return given


TemplateVariables = Annotated[dict[str, JsonValue], AfterValidator(_checked_variables)]


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    accepted = NO_EFFECT | {"verbosity"}
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have the same name")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: no tool has the name {self.tool_choice.function.name!r}")
        return self

    @property
    def top(self) -> int | None:
        """Return how many of the likeliest tokens to report; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def functions(self) -> list[FunctionDefinition]:
        """Return the functions that the model may call; an empty list if the tool choice is none."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as templates expect them; a tool's message gets the name of the function called."""
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        messages = [message.as_template_input() for message in self.messages]
        for given, message in zip(self.messages, messages, strict=True):
            if given.role == "tool" and (name := given.name or names.get(given.tool_call_id or "")):
                message["name"] = name
        return messages
