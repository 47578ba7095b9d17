"""Answers of OpenAI's Responses API: what the model says becomes items, told by events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from drafted_decoding import GenerationResult

from shardmill.media.prompt import Seen
from shardmill.serve.answer import Choice, usage
from shardmill.serve.jobs import Item, Work
from shardmill.serve.model import Model
from shardmill.serve.protocol import ApiError, Strict
from shardmill.serve.requests import ChatRequest
from shardmill.serve.responses import Json, ResponsesRequest
from shardmill.serve.tool_reader import AnswerDelta


class ResponsesAnswer:
    """One answer in progress, built from the items of a job: output items, told by events.

    Args:
        request: the request.
        chat: the chat request that asks the same.
        model: the model that answers.
        works: the engine's work, for its one choice.
    """

    done: ClassVar[bytes] = b""

    def __init__(self, request: ResponsesRequest, chat: ChatRequest, model: Model, works: Sequence[Work]) -> None:
        self._choice, self._pictures = Choice(chat, model, thinks=works[0].thinks), works[0].pictures
        self._output: list[Json] = []
        self._open: AnswerDelta | None = None  # the kind of the last item, if it may grow
        self._rows: list[Json] = []  # log-probabilities that no event has told
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
            "tool_choice": choice.model_dump() if isinstance(choice, Strict) else choice or "auto",
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
        pieces, rows = self._choice.digest(items)
        self._rows += [row.token | {"top_logprobs": row.top} for row in rows]
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
                "usage": _usage(done, self._choice.reasoning, self._pictures),
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
            yield self._of_part(f"{_PART[piece.kind]}.delta", self._told(piece.kind), delta=piece.text)

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
            yield self._of_part("response.content_part.added", part=_copy(item)["content"][0])

    def _end(self, status: str) -> Iterator[Json]:
        """Tell that the last item is complete, if it is not told yet."""
        if self._open is None:
            return
        item, kind = self._output[-1], self._open.kind
        if kind == "call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **arguments)
        else:
            self._told(kind)
            rows = item["content"][0].get("logprobs", ())
            yield self._of_part(f"{_PART[kind]}.done", rows, text=item["content"][0]["text"])
            yield self._of_part("response.content_part.done", part=_copy(item)["content"][0])
        item["status"], self._open = status, None
        yield self._of_item("response.output_item.done", item=_copy(item))

    def _told(self, kind: str) -> list[Json]:
        """Add the log-probabilities that no event has told to the last item, if it is a text, and return them."""
        if kind != "content":
            return []
        rows, self._rows = self._rows, []
        self._output[-1]["content"][0]["logprobs"] += rows
        return rows

    def _of_part(self, event: str, rows: Sequence[Json] = (), **fields: Any) -> Json:
        logprobs: Json = {"logprobs": [*rows]} if event.startswith("response.output_text") else {}
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
    if "content" not in item:
        return dict(item)
    lists = ("annotations", "logprobs")
    parts = [part | {name: [*part[name]] for name in lists if name in part} for part in item["content"]]
    return item | {"content": parts}


def _usage(done: GenerationResult, reasoning: int, pictures: Sequence[Seen]) -> Json:
    counted = usage([done], reasoning, pictures=pictures)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **counted["prompt_tokens_details"]},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": counted["completion_tokens_details"],
        "total_tokens": counted["total_tokens"],
    }
