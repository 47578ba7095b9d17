"""Readers of answers take steps that grow like the answer, whatever a model is made to write, whole or in pieces.

A step is a line of the server's own code. Each reader also holds back no more than a bounded text, which is all that it
searches again with each piece.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import drafted_decoding
import patterns
import pytest
import yaml
from drafted_decoding.text import TextStream
from patterns import ratio

import shardmill
from shardmill.config.reading import _repeated_key
from shardmill.serve.answer import Choice
from shardmill.serve.call_texts import gemma_calls, object_call, python_calls
from shardmill.serve.requests import ChatRequest
from shardmill.serve.thoughts import ThoughtReader
from shardmill.serve.tool_reader import CallReader
from shardmill.serve.tools import FORMATS, ToolFormat
from shardmill.templates.thoughts import FORMATS as THOUGHTS

from .fake import NAME, fake_model

OWN = tuple(str(Path(file).parent) for file in (shardmill.__file__, drafted_decoding.__file__))
SIZE, GREATEST = 64, 16.0  # characters, and ratio of the steps for eight times as many
HELD = 2048  # characters
TOOLS: dict[str, Any] = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "object"}}}}


def steps(work: Callable[[], object]) -> int:
    """The lines of the package's own code that run, and its calls, as the turns of a generator are."""
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        own = frame.f_code.co_filename.startswith(OWN)
        count += own
        return line if own else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def grows(read: Callable[[str], object], before: str, unit: str) -> float:
    """How many more steps eight times the text takes."""
    few, many = (steps(lambda n=n: read(before + unit * (n // len(unit) + 1))) for n in (SIZE, 8 * SIZE))  # type: ignore[misc]
    return many / few


def parts(form: ToolFormat) -> list[str]:
    """What an answer of a format is made of, and what is near it."""
    own = [form.begin, form.end, *(mark for pair in (*form.unmarked, form.around) for mark in pair), *form.tokens]
    common = [
        *'{}[]"\\ \n<a,;:(=.\'', "[a", '"a', "{'", "\\'", "a=", "f(a=1),", "'''", '<|"|>',
        "<function=f>", "</function>", "\n</function>", "<parameter=a>", "\n<parameter=b>", "</parameter>",
        "\n</parameter>", "\n</tool_call>", '{"name": "f"}', '{"name": "f", "arguments": {}}',
        "<|channel|>analysis<|message|>a<|end|>",
    ]  # fmt: skip
    return [*dict.fromkeys(filter(None, [*own, *common]))]


def openings(form: ToolFormat) -> list[str]:
    """What stands before the part that goes on: nothing, the mark, a call's beginning, a text in it."""
    head, _, rest = (form.around[0] + form.call).partition("NAME")
    called = f"{head}f{rest.partition('ARGUMENTS')[0]}"
    return [
        *dict.fromkeys(["", form.begin, head, called, f'{called}{{"a": "', f"{called}<parameter=a>\n", f"{called}a='"])
    ]


def fed(make: Callable[[], Any], text: str, size: int) -> int:
    """Give a text to a reader in pieces; return how much of it the reader held back, at most."""
    reader, held = make(), 0
    for at in range(0, len(text), size):
        reader.push(text[at : at + size])
        held = max(held, len(reader._text))
    reader.finish()
    return held


def slow(make: Callable[[], Any], openings: list[str], parts: list[str]) -> Iterator[str]:
    """The texts that take too many steps, or are held back."""
    for before in openings:
        for unit in parts:
            held = fed(make, before + unit * (4 * HELD // len(unit)), HELD // 4)
            if held > HELD:
                yield f"{before!r}, then {unit!r}: {held} characters are searched again"
            for size in (3, 10**6):
                ratio = grows(lambda text, size=size: fed(make, text, size), before, unit)  # type: ignore[misc]
                if ratio > GREATEST:
                    yield f"{before!r}, then {unit!r} in pieces of {size}: {ratio:.0f}"


@pytest.mark.thorough(but=["mistral", "qwen-xml"])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_calls_are_read_in_steps_that_grow_like_the_answer(form: ToolFormat) -> None:
    assert [*slow(lambda: CallReader(form, TOOLS), openings(form), parts(form))] == []


class Thoughts:
    """A reader of thoughts, fed like a reader of calls."""

    def __init__(self, index: int) -> None:
        self._reader = ThoughtReader(THOUGHTS[index], opened=False, tools=FORMATS[-2])

    def push(self, text: str) -> None:
        self._reader.push(text, ended=False)
        self._text = self._reader._text

    def finish(self) -> None:
        self._reader.push("", ended=True)


@pytest.mark.parametrize("index", range(len(THOUGHTS)))
def test_thoughts_are_read_in_steps_that_grow_like_the_answer(index: int) -> None:
    form = THOUGHTS[index]
    units = [form.begin, form.end, form.begin[:-1], form.end[:-1], " ", "a", "<tool_call>", "<"]
    assert [*slow(lambda: Thoughts(index), ["", form.begin], units)] == []


class Streamed:
    """Text of tokens, one for each character, with stop strings."""

    def __init__(self) -> None:
        self._stream = TextStream(lambda tokens: "".join(map(chr, tokens)), ["aab", "<stop>", " \n " * 5, "\ufffda"])

    def push(self, text: str) -> None:
        for character in text:
            self._stream.push(ord(character))
        self._text = self._stream._held + self._stream._text

    def finish(self) -> None:
        self._stream.flush()


def test_stop_strings_are_found_in_steps_that_grow_like_the_answer() -> None:
    assert [*slow(Streamed, [""], ["a", "aa<sto", " ", " \n", "\ufffd", "<"])] == []


@pytest.mark.parametrize("read", [object_call, lambda text: python_calls(text, {}), lambda text: gemma_calls(text, {})])
def test_a_call_as_text_is_read_in_steps_that_grow_like_it(read: Callable[[str], object]) -> None:
    units = [
        *"{}[]\"'\\ \n(a1,:=",
        "{'a':",
        "[1,",
        "f(a=1),",
        "a=1,",
        "'\\'",
        "'' ",
        "'''\\'",
        '"a":1,',
        '<|"|>',
        "call:f{",
    ]
    found = [
        (before, unit, grows(read, before, unit))
        for before in ("", "{", "[", "f(a=", "[f(", "call:f{")
        for unit in units
    ]
    assert [one for one in found if one[2] > GREATEST] == []


def test_tokens_of_thoughts_are_counted_in_steps_that_grow_like_the_answer() -> None:
    """An answer in channels may have as many thoughts as it has tokens."""

    def counted(n: int) -> int:
        request = ChatRequest.model_validate({"model": NAME, "messages": [{"role": "user", "content": "x"}]})
        choice = Choice(request, fake_model(tools="harmony"))
        assert choice._reader is not None
        choice._reader.thoughts = [(4 * i, 4 * i + 2) for i in range(n)]
        choice._places = [(i, i + 1) for i in range(4 * n)]
        assert choice.reasoning == 2 * n
        return steps(lambda: choice.reasoning)

    assert counted(8 * 16) / counted(16) < GREATEST


def test_repeated_keys_of_a_config_are_found_in_a_time_that_grows_like_it() -> None:
    """By CPU time, as counting in a list is no step of the package's own."""

    def work(n: int) -> Callable[[], object]:
        keys = [yaml.ScalarNode("tag:yaml.org,2002:str", f"key {i}") for i in range(n)]
        root = yaml.MappingNode("tag:yaml.org,2002:map", [(key, key) for key in keys])
        return lambda: _repeated_key(root)

    assert ratio(work, 2000, times=2) < patterns.GREATEST
