"""OpenAI's Responses API, without stored answers: requests become chat requests, and answers become items and events.

See https://platform.openai.com/docs/api-reference/responses. A client sends the whole conversation with each request:
what needs a stored answer is refused by name.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, ValidationError, field_validator, model_validator

from shardmill.decode import GenerationResult
from shardmill.serve.answer import Choice, usage
from shardmill.serve.engine_worker import Item
from shardmill.serve.model import Model
from shardmill.serve.protocol import (
    MOST_TOOLS,
    NO_EFFECT,
    ApiError,
    ChatRequest,
    Effort,
    Extension,
    Strict,
    TextPart,
    first_complaint,
    invalid,
)
from shardmill.serve.tool_reader import AnswerDelta

Json = dict[str, Any]
STATEFUL = ("previous_response_id", "conversation", "prompt", "background")
LEFT_OUT = "Shardmill-Tools-Left-Out"  # the header that names the tools which the model is not shown
WHY_NOT = "is not supported, as answers are not stored: send the whole conversation as input"


class InputPart(TextPart):
    """A part of a message or of a function's output."""

    accepted = frozenset({"annotations", "logprobs"})
    type: Literal["input_text", "output_text", "text"]  # type: ignore[assignment]


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
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
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
        return self

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
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
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
        found = handler(body | {"tools": [tool for tool in tools if not _is_other(tool)]})
        names = (":".join(filter(None, (one["type"], one.get("name")))) for one in filter(_is_other, tools))
        found._left_out = [_ODD.sub("?", name) for name in names]
        return found

    @model_validator(mode="before")
    @classmethod
    def _needs_no_state(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name in STATEFUL:
                if body.get(name):
                    raise ValueError(f"{name} {WHY_NOT}")
            if body.get("store") is True:
                raise ValueError(f"store: true {WHY_NOT}")
            if isinstance(body.get("input"), str):
                return body | {"input": [{"role": "user", "content": body["input"]}]}
        return body

    def as_chat(self) -> ChatRequest:
        """Return the chat request for the same answer.

        Raises:
            ApiError: if a chat request can't ask for this.
        """
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
            "tool_choice": {"type": choice.type, "function": {"name": choice.name}}
            if isinstance(choice, NamedFunction)
            else choice,
            "shardmill": self.shardmill,
        }
        if form.type != "text":
            given = {"name": form.name, "schema": form.schema_, "strict": form.strict}
            schema = given if form.type == "json_schema" and form.schema_ is not None else None
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
                messages.append({"role": item.role, "content": _text(item.content)})
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


def _text(content: str | list[InputPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class ResponsesAnswer:
    """One answer in progress, built from the items of a job: output items, told by events.

    Args:
        request: the request.
        chat: the chat request that asks the same.
        model: the model that answers.
        thinks: whether the prompt has opened a thought.
    """

    done: ClassVar[bytes] = b""

    def __init__(self, request: ResponsesRequest, chat: ChatRequest, model: Model, *, thinks: bool = False) -> None:
        self._choice = Choice(chat, model, thinks=thinks)
        self._output: list[Json] = []
        self._open: AnswerDelta | None = None  # the kind of the last item, if it may grow
        self._events = 0
        choice = request.tool_choice
        self._response: Json = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": request.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": request.top_p,
            "usage": None,
            "metadata": request.metadata or {},
        }

    def whole(self, answers: Sequence[list[Item]]) -> Json:
        """Return the answer as one object, from all items of its job."""
        (items,) = answers
        *_, last = self.chunks(0, items)
        response: Json = last["response"]
        return response

    def opening(self, index: int) -> Iterator[Json]:
        """See `stream.Streamed`."""
        yield self._event("response.created", response=self._snapshot())
        yield self._event("response.in_progress", response=self._snapshot())

    def chunks(self, index: int, items: list[Item]) -> Iterator[Json]:
        """See `stream.Streamed`."""
        pieces, _ = self._choice.digest(items)
        for piece in pieces:
            yield from self._add(piece)
        done = items[-1]
        if isinstance(done, ApiError):
            failed = {"status": "failed", "error": {"code": "server_error", "message": str(done)}}
            yield self._event("response.failed", response=self._snapshot() | failed)
        if isinstance(done, GenerationResult):
            cut = self._choice.finish(done) == "length"
            if not self._output:
                yield from self._begin(AnswerDelta("content", ""))
            yield from self._end("incomplete" if cut else "completed")
            self._response |= {
                "status": "incomplete" if cut else "completed",
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                "usage": _usage(done, self._choice.reasoning),
            }
            yield self._event(f"response.{self._response['status']}", response=self._snapshot())

    def closing(self) -> Iterator[Json]:
        """See `stream.Streamed`."""
        yield from ()

    def _add(self, piece: AnswerDelta) -> Iterator[Json]:
        """Tell a piece. It belongs to the last item, or begins another one."""
        if piece.kind == "call" or (piece.kind != "arguments" and (not self._open or self._open.kind != piece.kind)):
            yield from self._end("completed")
            yield from self._begin(piece)
        item = self._output[-1]
        if piece.kind == "arguments":
            item["arguments"] += piece.text
            yield self._of_item("response.function_call_arguments.delta", delta=piece.text)
        elif piece.kind != "call":
            item["content"][0]["text"] += piece.text
            yield self._of_part(f"{_PART[piece.kind]}.delta", delta=piece.text)

    def _begin(self, piece: AnswerDelta) -> Iterator[Json]:
        item: Json = {"id": f"{_PREFIX[piece.kind]}_{secrets.token_hex(16)}", "status": "in_progress"}
        if piece.kind == "call":
            item |= {"type": "function_call", "call_id": f"call_{piece.id}", "name": piece.text, "arguments": ""}
        elif piece.kind == "thought":
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        self._output.append(item)
        self._open = piece
        yield self._of_item("response.output_item.added", item=_copy(item))
        if piece.kind != "call":
            part: Json = {"type": _PART[piece.kind].removeprefix("response."), "text": ""}
            item["content"].append(part | ({"annotations": [], "logprobs": []} if piece.kind == "content" else {}))
            yield self._of_part("response.content_part.added", part=dict(item["content"][0]))

    def _end(self, status: str) -> Iterator[Json]:
        """Tell that the last item is complete, if it is not told yet."""
        if self._open is None:
            return
        item, kind = self._output[-1], self._open.kind
        if kind == "call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **arguments)
        else:
            yield self._of_part(f"{_PART[kind]}.done", text=item["content"][0]["text"])
            yield self._of_part("response.content_part.done", part=dict(item["content"][0]))
        item["status"], self._open = status, None
        yield self._of_item("response.output_item.done", item=_copy(item))

    def _of_part(self, event: str, **fields: Any) -> Json:
        logprobs: Json = {"logprobs": []} if event.startswith("response.output_text") else {}
        return self._of_item(event, content_index=0, **fields, **logprobs)

    def _of_item(self, event: str, **fields: Any) -> Json:
        index = len(self._output) - 1
        item = {} if "item" in fields else {"item_id": self._output[index]["id"]}
        return self._event(event, output_index=index, **item, **fields)

    def _event(self, event: str, **fields: Any) -> Json:
        self._events += 1
        return {"type": event, "sequence_number": self._events - 1, **fields}

    def _snapshot(self) -> Json:
        return self._response | {"output": [_copy(item) for item in self._output]}


_PART = {"content": "response.output_text", "thought": "response.reasoning_text"}
_PREFIX = {"content": "msg", "thought": "rs", "call": "fc"}


def _copy(item: Json) -> Json:
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})


def _usage(done: GenerationResult, reasoning: int) -> Json:
    counted = usage([done], reasoning)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **counted["prompt_tokens_details"]},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": counted["completion_tokens_details"],
        "total_tokens": counted["total_tokens"],
    }
