"""OpenAI's Responses API, without stored answers: requests become chat requests.

See https://platform.openai.com/docs/api-reference/responses. A client sends the whole conversation with each request:
what needs a stored answer is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeGuard

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, ValidationError, field_validator, model_validator

from shardmill.serve.protocol import (
    MOST_TOOLS,
    NO_EFFECT,
    NO_IMAGES,
    NO_SOUNDS,
    Effort,
    RefusalPart,
    SoundPart,
    Strict,
    TextPart,
    WithoutMedia,
    first_complaint,
    invalid,
)
from shardmill.serve.requests import ChatRequest, Extension

Json = dict[str, Any]
STATEFUL = ("previous_response_id", "conversation", "prompt", "background")
LEFT_OUT = "Shardmill-Tools-Left-Out"  # the header that names the tools which the model is not shown
WHY_NOT = "is not supported, as answers are not stored: send the whole conversation as input"


class InputPart(TextPart):
    """A part of a message or of a function's output."""

    accepted = frozenset({"annotations", "logprobs"})
    type: Literal["input_text", "output_text", "text"]  # type: ignore[assignment]


class InputImage(Strict):
    """A part of a user's message that is an image."""

    accepted = frozenset({"detail"})
    type: Literal["input_image"]
    image_url: str


class InputItem(Strict):
    """A message, a call, its output, or a thought. Items of an earlier answer may be sent back as they came."""

    accepted = frozenset({"id", "status", "phase", "encrypted_content", "namespace", "parsed_arguments"})
    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[str | list[InputPart | RefusalPart | InputImage | SoundPart] | None, WithoutMedia] = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Annotated[str | list[InputPart] | None, WithoutMedia] = None
    summary: list[Any] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _without_thoughts(cls, value: Any) -> Any:
        """Leave out a thought's parts, which are of another type: templates drop earlier thoughts."""
        parts = value if isinstance(value, list) else []
        return None if any(isinstance(p, dict) and p.get("type") == "reasoning_text" for p in parts) else value

    @model_validator(mode="after")
    def _is_whole(self) -> InputItem:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "custom_tool_call": ("call_id", "name", "input"),
            "custom_tool_call_output": ("call_id", "output"),
            "reasoning": (),
        }[self.type]
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type} needs {name}")
        if (what := self.media) and self.role != "user":
            raise ValueError(f"a message of role {self.role} can't have {what}: only a user's can")
        return self

    @property
    def media(self) -> str:
        """Return what its content has beside text: images or audio; "" for nothing."""
        parts = self.content if isinstance(self.content, list) else []
        kinds = ("images" if isinstance(part, InputImage) else "audio" for part in parts if _is_medium(part))
        return next(kinds, "")

    @property
    def called(self) -> Json | None:
        """Return the function that the item calls; a custom tool's text is its only argument. None if it calls none."""
        if self.type == "custom_tool_call":
            return {"name": self.name, "arguments": json.dumps({"input": self.input}, ensure_ascii=False)}
        return {"name": self.name, "arguments": self.arguments} if self.type == "function_call" else None


class FunctionTool(Strict):
    """A tool, whose fields are not nested as in a chat request."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _is_json(cls, value: Any) -> Any:
        """Refuse NaN and infinities, which Python reads: they would come back in an answer that is no JSON."""
        json.dumps(value, allow_nan=False)  # raises a ValueError that says so
        return value


class NamedFunction(Strict):
    """A tool choice that names a function."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Strict):
    """A tool choice that names several functions; the model is shown no other."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MOST_TOOLS)]


class TextFormat(Strict):
    """The object `text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    """The object `text`."""

    accepted = frozenset({"verbosity"})
    format: TextFormat = Field(default_factory=lambda: TextFormat(schema=None))


class Reasoning(Strict):
    """The object `reasoning`: the model thinks as its template says, which may read the effort."""

    accepted = frozenset({"summary", "generate_summary"})
    effort: Effort | None = None


class ResponsesRequest(Strict):
    """The body of POST /v1/responses. Tools of other kinds than functions are left out, see `headers`."""

    accepted = (NO_EFFECT - {"store", "metadata"}) | {"truncation", "client_metadata"}
    model: str
    input: list[InputItem] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: dict[Literal["include_obfuscation"], bool] | None = None
    text: TextConfig = Field(default_factory=TextConfig)
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    store: bool | None = None
    metadata: dict[str, str] | None = None
    shardmill: Extension = Field(default_factory=Extension)
    _left_out: list[str] = PrivateAttr(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """Return the answer's headers: what tools are left out, each by its kind and its name, if it has one."""
        return {LEFT_OUT: ", ".join(self._left_out)} if self._left_out else {}

    @model_validator(mode="wrap")
    @classmethod
    def _has_functions_alone(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        tools = body.get("tools") if isinstance(body, dict) else None
        if not isinstance(tools, list) or not any(map(_is_other, tools)):
            return handler(body)
        if len(tools) > MOST_TOOLS:
            raise ValueError(f"tools: there are {len(tools)}, at most {MOST_TOOLS} are allowed")
        request = handler(body | {"tools": [tool for tool in tools if not _is_other(tool)]})
        names = (":".join(filter(None, (one["type"], one.get("name")))) for one in filter(_is_other, tools))
        request._left_out = [_ODD.sub("?", name) for name in names]
        return request

    @model_validator(mode="before")
    @classmethod
    def _needs_no_state(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name in STATEFUL:
                if body.get(name):
                    raise ValueError(f"{name} {WHY_NOT}")
            if isinstance(body.get("input"), str):
                return body | {"input": [{"role": "user", "content": body["input"]}]}
        return body

    @property
    def logprobs(self) -> bool:
        """Return whether the answer tells its tokens' log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ())

    def as_chat(self, media: Mapping[str, object] = MappingProxyType({})) -> ChatRequest:
        """Return the chat request for the same answer.

        Args:
            media: what the model takes, images or audio; the values of others are None.

        Raises:
            ApiError: if a chat request can't ask for this.
        """
        for place, item in enumerate(self.input):
            if item.media and media.get(item.media) is None:
                refusal = NO_IMAGES if item.media == "images" else NO_SOUNDS
                raise invalid(f"input.{place}.content: {refusal}", "input")
        form, choice = self.text.format, self.tool_choice
        body: Json = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools or ()],
            "tool_choice": _chat_choice(choice),
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
            "shardmill": self.shardmill,
        }
        if form.type != "text":
            described = {"name": form.name, "schema": form.schema_, "strict": form.strict}
            schema = described if form.type == "json_schema" and form.schema_ is not None else None
            body["response_format"] = {"type": form.type, "json_schema": schema}
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:
            raise first_complaint(error.errors()) from error

    def _messages(self) -> list[Json]:
        """Return the conversation. An answer's text and its calls are items here, but one message of a chat."""
        messages: list[Json] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        answering = False
        for item in self.input:
            called = item.called
            mine = called is not None or (item.type == "message" and item.role == "assistant")
            if mine and not answering:
                messages.append({"role": "assistant", "content": None})
            if called:
                messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": called})
            elif mine:
                messages[-1]["content"] = (messages[-1]["content"] or "") + _text(item.content)
            elif item.type == "message":
                messages.append({"role": item.role, "content": _parts(item.content)})
            elif item.type.endswith("_output"):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            answering = mine or (answering and item.type == "reasoning")
        if not messages:
            raise invalid("input: there is no message", "input")
        return messages


_ODD = re.compile(r"[^\w.:-]", re.ASCII)  # what a header can't have, and what would look like another tool there


def _is_other(tool: Any) -> bool:
    """Return whether a tool is of a kind that this server can't show to a model, such as a search of the web."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name", ""), str | None):
        return False
    return isinstance(tool.get("type"), str) and tool["type"] not in ("", "function")


def _chat_choice(choice: str | NamedFunction | AllowedFunctions | None) -> str | Json | None:
    """Return a tool choice as a chat request has it."""

    def named(one: NamedFunction) -> Json:
        return {"type": one.type, "function": {"name": one.name}}

    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [named(one) for one in choice.tools]}
        return {"type": choice.type, "allowed_tools": allowed}
    return named(choice) if isinstance(choice, NamedFunction) else choice


def _is_medium(part: InputPart | RefusalPart | InputImage | SoundPart) -> TypeGuard[InputImage | SoundPart]:
    return isinstance(part, InputImage | SoundPart)


def _text(content: str | Sequence[InputPart | RefusalPart | InputImage | SoundPart] | None) -> str:
    return content if isinstance(content, str) else "".join(getattr(part, "text", "") for part in content or ())


def _parts(content: str | Sequence[InputPart | RefusalPart | InputImage | SoundPart] | None) -> str | list[Json]:
    """Return a message's content as a chat request has it: its text, or the parts of one with images or sounds."""
    if isinstance(content, str) or not any(map(_is_medium, content or ())):
        return _text(content)

    def part_of_chat(part: InputPart | RefusalPart | InputImage | SoundPart) -> Json:
        if isinstance(part, InputImage):
            return {"type": "image_url", "image_url": {"url": part.image_url}}
        return part.model_dump() if isinstance(part, SoundPart) else {"type": "text", "text": part.text}

    return [part_of_chat(part) for part in content or ()]
