"""OpenAI's protocol: the fields of requests, and errors in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from shardmill.errors import ShardmillError
from shardmill.files import parse_json
from shardmill.printable import one_line
from shardmill.templates.render import NO_PARAMETERS
from shardmill.templates.thoughts import thought_fields


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
LONGEST_REGEX = 4096  # characters
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
EITHER = {  # fields that accept several types, for which pydantic would report the first type only
    "prompt": f"must be a text, a list of tokens, or a list of 1 to {MOST_PROMPTS} such prompts",
    "stop": f"must be a text of 1 to {LONGEST_STOP} characters or a list of at most {MOST_STOPS} such texts",
    "content": "must be a text or a list of parts of type text, or image_url for a user",
    "input": f"must be a text or a list of at most {MOST_TEXTS} texts, and no text may be empty; "
    "/v1/embeddings takes tokens, too",
    "tool_choice": 'must be none, auto, required, {"type": "function", "function": {"name": NAME}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": MODE, "tools": [...]}}',
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


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    """A part of an earlier answer of OpenAI's models, in which they refuse."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Return what the model said."""
        return self.refusal


class ImageUrl(Strict):
    """The object `image_url`; `detail` is OpenAI's word for a size, which here follows from the model's rules."""

    accepted = frozenset({"detail"})
    url: str


class ImagePart(Strict):
    """A part of a user's message that is an image."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Sound(Strict):
    """The object `input_audio`: a file in base64. What it holds says the format; the name of one is not needed."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg"] | None = None


class SoundPart(Strict):
    """A part of a user's message that is a sound."""

    type: Literal["input_audio"]
    input_audio: Sound


NO_IMAGES = "this model takes no images: send text alone"
NO_SOUNDS = "this model takes no audio: send text alone"
MEDIA = {"audio_url": "audio", "video_url": "videos", "file": "files", "input_file": "files"}


def _without_media(content: Any) -> Any:
    """Return a message's content. Raises ValueError for a part of another kind, by the name of what it is."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in MEDIA:
            raise ValueError(f"no {MEDIA[kind]} can be sent here: send text alone")
    return content


WithoutMedia = BeforeValidator(_without_media)


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


class Allowed(Strict):
    """The object `allowed_tools` of a tool choice."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedTools(Strict):
    """A tool choice that names several functions; the model is shown no other."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class ChatMessage(Strict):
    """A message; its content may have several parts: texts, and of a user images or sounds."""

    accepted = frozenset({"annotations", "parsed"})  # fields of answers, present when a client sends an answer back
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart | RefusalPart | ImagePart | SoundPart] | None, WithoutMedia] = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} can't have tool_calls")
        if self.content is None and not (self.tool_calls or self.thought or self.refusal):
            raise ValueError("content is missing: only a message with tool_calls or a thought may leave it out")
        if (self.images or self.sounds) and self.role != "user":
            what = "images" if self.images else "audio"
            raise ValueError(f"a message of role {self.role} can't have {what}: only a user's can")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role tool needs the tool_call_id of the call that it answers")
        return self

    @property
    def thought(self) -> str | None:
        """Return the thought before an earlier answer, under its older or newer name."""
        return self.reasoning_content or self.reasoning

    @property
    def images(self) -> list[str]:
        """Return the addresses of its images, in order."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    @property
    def sounds(self) -> list[str]:
        """Return its sounds in base64, in order."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.input_audio.data for part in parts if isinstance(part, SoundPart)]

    def as_template_input(self) -> dict[str, Any]:
        """Return the message as templates expect it; `developer` is the newer name of `system`, unknown to them.

        Content with images or sounds has its parts, and an image or a sound in it is only its place.
        """
        parts = self.refusal if self.content is None else self.content
        content: Any = parts if isinstance(parts, str) else "".join(getattr(part, "text", "") for part in parts or ())
        if (self.images or self.sounds) and isinstance(parts, list):
            kinds = {ImagePart: "image", SoundPart: "audio"}
            content = [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart | RefusalPart)
                else {"type": kinds[type(part)]}
                for part in parts
            ]
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            calls = [{"id": c.id, "type": c.type, "function": c.function.as_template_input()} for c in self.tool_calls]
            message["tool_calls"] = calls
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        return message | thought_fields(self.thought)
