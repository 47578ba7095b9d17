"""The reader of thoughts: what it splits, however the answer arrives."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.serve.thoughts import ThoughtReader
from shardmill.serve.tools import FORMATS as TOOL_FORMATS
from shardmill.templates.thoughts import FORMATS, ThoughtFormat, find_thoughts

from . import templates

TOOLS = {form.name: form for form in TOOL_FORMATS}
THINK = FORMATS[-1]  # as most templates have it


def read(
    pieces: Sequence[str], form: ThoughtFormat = THINK, *, opened: bool = False, tools: str = ""
) -> tuple[str, str]:
    """The thought and the text of an answer that arrives in pieces; the span has the whole thought."""
    reader = ThoughtReader(form, opened=opened, tools=TOOLS.get(tools))
    told = [reader.push(piece, ended=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    thought, (first, last) = "".join(thought for thought, _ in told), reader.span
    assert "".join(pieces)[first : None if last == math.inf else int(last)].strip() == thought
    return thought, "".join(text for _, text in told)


def expected(answer: str, form: ThoughtFormat, opened: bool) -> tuple[str, str]:
    """The same, by one regular expression."""
    begin = "" if opened else re.escape(form.begin)
    found = re.fullmatch(rf"\s*{begin}(?P<thought>.*?)(?:{re.escape(form.end)}\s*(?P<text>.*))?", answer, re.DOTALL)
    if not found:
        return "", answer
    return found["thought"].strip(), found["text"] or ""


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.end)
@given(data=st.data(), opened=st.booleans())
def test_an_answer_is_split_alike_however_it_is_cut(form: ThoughtFormat, data: st.DataObject, opened: bool) -> None:
    """Marks in the middle, half marks and white space included."""
    bits = [form.begin, form.end, form.begin[:3], form.end[:-1], "a", "é🙂", " ", "\n"]
    answer = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=9)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in pairwise([0, *cuts, len(answer)])]
    assert read(pieces, form, opened=opened) == expected(answer, form, opened)


def test_a_thought_is_told_as_it_comes() -> None:
    """All of it but white space at its end, and what may be a mark."""
    reader = ThoughtReader(THINK, opened=True)
    pieces = ["\nIt ", "rains", " <", "b> </", "think>", "\n\n", "Yes."]
    told = [reader.push(piece, ended=False) for piece in pieces]
    assert told == [("It", ""), (" rains", ""), ("", ""), (" <b>", ""), ("", ""), ("", ""), ("", "Yes.")]


@pytest.mark.parametrize("form", ["qwen-xml", "hermes", "gemma", "lfm2", "mistral-11"])
def test_a_call_ends_a_thought_that_was_never_closed(form: str) -> None:
    """But not the mention of its mark."""
    call = TOOLS[form].around[0] + TOOLS[form].call
    answer = f"The mark is {TOOLS[form].begin}, I think.\n{call}"
    assert read([*answer], opened=True, tools=form)[1].startswith(call.partition("NAME")[0])
    assert read([answer], opened=True) == (answer, "")


def test_the_marks_are_those_of_the_template() -> None:
    for form in FORMATS:
        assert find_thoughts(f"{{% if add_generation_prompt %}}{form.begin}{{% endif %}}") is form
        assert form.opened_by(f"user: {form.end} assistant: {form.begin}\n")
        assert not form.opened_by(f"assistant: {form.begin}\n\n{form.end}\n\n")
    assert {form.begin for form in FORMATS} >= {"<think>", "<seed:think>", "[THINK]"}
    assert find_thoughts(templates.QWEN_3_5) is find_thoughts(templates.THINKING) is THINK
    assert find_thoughts(templates.CHATML) is find_thoughts(templates.GEMMA_4) is None
