"""Turns tokens into an answer: one JSON object, or the chunks of a stream.

An answer has one or more choices (`n`), each from another job. A stream sends them one after the other, in the
order in which the engine answers them.
"""

from __future__ import annotations

import math
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from drafted_decoding import FinishReason, GenerationResult, PrefillEvent, PromptLogprob, TokenEvent

from shardmill.media.prompt import Seen
from shardmill.serve.jobs import Item, Work
from shardmill.serve.logprobs import LEAST, Json, LogprobLog, TokenLogprob, chat_logprobs, text_logprobs
from shardmill.serve.model import Model
from shardmill.serve.protocol import ApiError
from shardmill.serve.requests import ChatRequest, CompletionRequest, StreamOptions
from shardmill.serve.thoughts import ThoughtReader, answer_deltas
from shardmill.serve.tool_reader import AnswerDelta, CallReader

Prompt = str | list[int]


@dataclass(frozen=True)
class Shape:
    """The JSON form of a kind of answer.

    Attributes:
        prefix: prefix of the answer's id.
        whole_name, piece_name: the `object` of an answer and of a chunk.
        whole: pieces -> the choice's content.
        piece: a piece -> a chunk's content.
        opening: content of an extra first chunk, or None.
        end: content of a chunk without text.
        logprobs: tokens -> the choice's `logprobs`.
    """

    prefix: str
    whole_name: str
    piece_name: str
    whole: Callable[[Sequence[AnswerDelta]], Json]
    piece: Callable[[AnswerDelta], Json]
    opening: Json | None
    end: Json
    logprobs: Callable[[Sequence[TokenLogprob]], Json]


def _text_of(pieces: Sequence[AnswerDelta], kind: str = "content") -> str:
    """Return the text of the pieces of a kind."""
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def _calls_of(pieces: Sequence[AnswerDelta]) -> list[tuple[AnswerDelta, str]]:
    """Return the calls in an answer, each with its arguments."""
    calls = [piece for piece in pieces if piece.kind == "call"]
    return [(call, _text_of([piece for piece in pieces if piece.index == call.index], "arguments")) for call in calls]


def _message(pieces: Sequence[AnswerDelta]) -> Json:
    """Return a chat's message. Its content is null if the model only calls functions, as in OpenAI's API, or thinks."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.text, "arguments": arguments}}
        for call, arguments in _calls_of(pieces)
    ]
    text, thought = _text_of(pieces), _text_of(pieces, "thought")
    message = {"role": "assistant", "content": None if (calls or thought) and not text else text, "refusal": None}
    return message | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def _delta(piece: AnswerDelta) -> Json:
    if piece.kind == "call":
        function = {"name": piece.text, "arguments": ""}
        return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}
    if piece.kind == "arguments":
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    return {"content" if piece.kind == "content" else "reasoning_content": piece.text}


COMPLETION = Shape(
    prefix="cmpl-",
    whole_name="text_completion",
    piece_name="text_completion",
    whole=lambda pieces: {"text": _text_of(pieces)},
    piece=lambda piece: {"text": piece.text},
    opening=None,
    end={"text": ""},
    logprobs=text_logprobs,
)
CHAT = Shape(
    prefix="chatcmpl-",
    whole_name="chat.completion",
    piece_name="chat.completion.chunk",
    whole=lambda pieces: {"message": _message(pieces)},
    piece=lambda piece: {"delta": _delta(piece)},
    opening={"delta": {"role": "assistant", "content": ""}},
    end={"delta": {}},
    logprobs=chat_logprobs,
)


FINISH: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class Choice:
    """One choice of an answer, in progress.

    Args:
        request: the request.
        model: the model that answers.
        thinks: whether the prompt has opened a thought.
        echo: the prompt with which the text begins.
    """

    def __init__(
        self,
        request: CompletionRequest | ChatRequest,
        model: Model,
        *,
        thinks: bool = False,
        echo: Prompt | None = None,
    ) -> None:
        vocabulary = self._vocabulary = model.vocabulary
        self._echo = echo if echo is None or isinstance(echo, str) else vocabulary.joined(echo)
        self._prompt: list[PromptLogprob] = []
        # After a prompt the token that ends the text is told, as in vLLM: lm-evaluation-harness drops the last one.
        silent = request.ends(model.eos) if echo is None else ()
        self._top = request.top or 0
        self._log = None if request.top is None else LogprobLog(vocabulary, silent, len(self._echo or ""))
        self._thoughts: ThoughtReader | None = None
        self._reader: CallReader | None = None
        tools = model.tools_of(request)
        if isinstance(request, ChatRequest) and model.thoughts is not None:
            self._thoughts = ThoughtReader(model.thoughts, opened=thinks, tools=tools)
        if isinstance(request, ChatRequest) and tools is not None:
            schemas = {function.name: function.parameters or {} for function in request.functions}
            self._reader = CallReader(tools, schemas, parallel=request.parallel_tool_calls is not False)
        self._calls_alone = isinstance(request, ChatRequest) and request.must_call
        self._length = 0
        self._eos = request.ends(model.eos)
        self._places: list[tuple[int, int]] = []  # of tokens, which may be of a thought: from and to, in characters

    def digest(self, items: list[Item]) -> tuple[list[AnswerDelta], list[TokenLogprob]]:
        """Return what became certain, and the log-probabilities of the text that became final."""
        self._prompt += [one for item in items if isinstance(item, PrefillEvent) for one in item.scored]
        done = items[-1]
        if isinstance(done, PrefillEvent):
            return [], []
        rows = self._log.echoed(self._prompt, self._top) if self._log and self._echo is not None else []
        text, self._echo = self._echo or "", None
        for item in items:
            if isinstance(item, TokenEvent):
                text += item.text
                if self._log is not None:
                    self._log.push(item)
                if (self._thoughts or self._reader) and item.token not in self._eos:
                    self._places.append((item.start, item.end))
            elif isinstance(item, GenerationResult):
                text += item.tail
        self._length += len(text)
        cut = not isinstance(done, GenerationResult) or done.finish_reason == "stop"
        rows += self._log.release(self._length if cut else math.inf) if self._log is not None else []
        deltas = answer_deltas(self._thoughts, self._reader, text, ended=not isinstance(done, TokenEvent))
        # The grammar of an answer that must be calls has no text: what reads as text is a call that was cut short.
        return [one for one in deltas if not (self._calls_alone and one.kind == "content")], rows

    def prompt_logprobs(self, top: int) -> list[Json | None]:
        """Return the prompt's tokens and the `top` likeliest in their places, as vLLM tells them."""

        def entry(token: int, logprob: float, rank: int) -> tuple[str, Json]:
            text = self._vocabulary.text(token)
            return str(token), {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": text}

        entries: list[Json | None] = []
        for one in self._prompt:
            others = [entry(token, logprob, rank) for rank, (token, logprob) in enumerate(one.top[:top], 1)]
            entries.append(None if one.logprob is None else dict([entry(one.token, one.logprob, one.rank), *others]))
        return entries

    @property
    def reasoning(self) -> int:
        """Return the number of tokens between the marks of thoughts, as vLLM counts them; 0 without a thought.

        A token that ends a thought and begins the mark counts, since the thought needed it.
        """
        spans = [self._thoughts.span] if self._thoughts else self._reader.thoughts if self._reader else []
        firsts = [first for first, _ in spans]  # of spans in their order, none of which meets another

        def meets(start: int, end: int) -> bool:
            before = bisect_left(firsts, end)
            return before > 0 and start < spans[before - 1][1]

        return sum(meets(start, end) for start, end in self._places)

    def finish(self, done: GenerationResult) -> str:
        """Return why the choice ended: with its calls only if the model itself ended them."""
        reason = FINISH[done.finish_reason]
        called = self._reader is not None and self._reader.calls > 0 and self._reader.complete
        return "tool_calls" if called and reason == "stop" else reason


class Answer:
    """One answer in progress, built from the items of a job for each choice.

    Args:
        request: the request.
        model: the model that answers.
        works: the engine's work for each choice.
    """

    done: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(self, request: CompletionRequest | ChatRequest, model: Model, works: Sequence[Work]) -> None:
        self._request = request
        self._shape = CHAT if isinstance(request, ChatRequest) else COMPLETION
        echoed = request.prompts if isinstance(request, CompletionRequest) and request.echo else None
        echoes = [echoed[i // (request.n or 1)] if echoed else None for i in range(request.choices)]
        self._choices = [Choice(request, model, thinks=works[0].thinks, echo=echo) for echo in echoes]
        self._prompt_tokens = sum(len(work.prompt) for work in works[:: request.n or 1])
        self._pictures = [picture for work in works[:: request.n or 1] for picture in work.pictures]
        self._told = 0  # tokens of the answer so far
        self._results: list[GenerationResult] = []
        self._head = {
            "id": self._shape.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": model.fingerprint or None,
        }
        asked = request.stream_options or StreamOptions()
        self._piece_head = self._head | ({"usage": None} if asked.include_usage else {})
        self._continuous = asked.include_usage and bool(asked.continuous_usage_stats)

    def whole(self, answers: Sequence[list[Item]]) -> Json:
        """Return the answer as one object, from all items of each job."""
        choices: list[Json] = []
        for index, items in enumerate(answers):
            pieces, rows = self._choices[index].digest(items)
            done = self._ended(items)
            logprobs = None if self._request.top is None else self._shape.logprobs(rows)
            finish = self._choices[index].finish(done)
            choices.append(self._choice(index, self._shape.whole(pieces), logprobs, finish))
        head = {**self._head, "object": self._shape.whole_name, "choices": choices}
        if (top := self._request.prompt_logprobs) is not None:  # of a chat, whose choices have one prompt, once
            for index, told in enumerate(choices if self._shape is COMPLETION else [head]):
                told["prompt_logprobs"] = self._choices[index].prompt_logprobs(top)
        return head | {"usage": self._usage()} | self._figures(self._results[-1])

    def opening(self, index: int) -> Iterator[Json]:
        """See `stream.Streamed`."""
        if self._shape.opening is not None:
            yield self._chunk([self._choice(index, self._shape.opening, None, None)])

    def chunks(self, index: int, items: list[Item]) -> Iterator[Json]:
        """See `stream.Streamed`."""
        self._told += sum(isinstance(item, TokenEvent) for item in items)
        pieces, rows = self._choices[index].digest(items)
        contents = [self._shape.piece(piece) for piece in pieces] or ([self._shape.end] if rows else [])
        for place, content in enumerate(contents):
            logprobs = self._shape.logprobs(rows) if rows and place == 0 else None
            yield self._chunk([self._choice(index, content, logprobs, None)])
        if isinstance(items[-1], ApiError):
            yield items[-1].content()
        if isinstance(items[-1], GenerationResult):
            done = self._ended(items)
            finish = self._choices[index].finish(done)
            yield self._chunk([self._choice(index, self._shape.end, None, finish)]) | self._figures(done)

    def closing(self) -> Iterator[Json]:
        """See `stream.Streamed`."""
        if "usage" in self._piece_head:
            yield self._chunk([]) | {"usage": self._usage()}

    def _usage(self) -> Json:
        reasoning = sum(choice.reasoning for choice in self._choices)
        return usage(self._results, reasoning, self._request.n or 1, self._pictures)

    def _ended(self, items: list[Item]) -> GenerationResult:
        done = items[-1]
        assert isinstance(done, GenerationResult)
        self._results.append(done)
        return done

    def _choice(self, index: int, content: Json, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._piece_head, "object": self._shape.piece_name, "choices": choices}
        if self._continuous:
            prompt, told = self._prompt_tokens, self._told
            chunk["usage"] = {"prompt_tokens": prompt, "completion_tokens": told, "total_tokens": prompt + told}
        return chunk

    def _figures(self, done: GenerationResult) -> Json:
        """Return the requested figures of an answer and, even if not requested, a mark on lossy answers."""
        asked = self._request.shardmill
        content = _figures(done) if asked.figures else {}
        if asked.accept_top_p is not None:
            content["lossy"] = True
        return {"shardmill": content} if content else {}


def usage(results: Sequence[GenerationResult], reasoning: int, n: int = 1, pictures: Sequence[Seen] = ()) -> Json:
    """Return OpenAI's `usage` of all choices; each prompt counts once, and an end-of-text token as generated.

    Args:
        results: the results of the choices.
        reasoning: how many of the generated tokens are of thoughts.
        n: how many choices each prompt has.
        pictures: the pictures of the prompts. A model sees most of them smaller than they were sent, so it says how.
    """
    first, generated = results[::n], sum(len(done.tokens) for done in results)
    prompt = sum(done.prompt_tokens for done in first)
    details: Json = {"cached_tokens": sum(done.reused_tokens for done in first)}
    if pictures:
        facts = [picture.facts() for picture in pictures]
        kind, many = pictures[0].kind
        details |= {f"{kind}_tokens": sum(fact["tokens"] for fact in facts), many: facts}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _figures(result: GenerationResult) -> Json:
    """Return the figures of an answer, for clients that send `"shardmill": {"figures": true}`."""
    return {
        "finish_reason": result.finish_reason,
        "tokens": list(result.tokens),
        "passes": result.passes,
        "drafted": list(result.drafted),
        "accepted": list(result.accepted),
        "pass_seconds": list(result.pass_seconds),
        "verified_again": result.verified_again,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "drafter_seconds": result.drafter_seconds,
    }
