"""A published template and what model.json says of it write the same. SHARDMILL_TEMPLATES names their folder."""

from __future__ import annotations

import pytest

from shardmill.checkpoint.tokenizer import ODD_TEXTS
from shardmill.templates.derive import derive
from shardmill.templates.form import ChatFormat

from .published import DAY, PUBLISHED, TEMPLATES, conversations, template
from .test_chat_format import renderer

TEXTS = [*ODD_TEXTS, " ", "\n", "Hi", "</think>", "<think>", "/no_think", "<tool_response>", "<channel|>", "<|channel>"]


def whole_format(name: str) -> tuple[str, ChatFormat]:
    """Return a published template and what model.json says of it. Skips if the template is not there."""
    text = template(name)
    if text is None:
        pytest.skip(
            f"{TEMPLATES} names no folder with {name}.jinja: {PUBLISHED[name].file} of {PUBLISHED[name].source}"
        )
    plain, whole = derive(renderer(text), text)
    found = whole or plain
    assert found is not None
    return text, found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_hundred_conversations_are_written_as_jinja_writes_them(name: str) -> None:
    """What the format says it can't write is refused by name, so it is counted."""
    text, found = whole_format(name)
    render, written = renderer(text), 0
    for talk in conversations(name, TEXTS, told=found.system is not None):
        if found.takes(talk):
            assert found.text(talk, DAY.strftime) == render(talk, True, DAY.strftime)
            written += 1
    assert written >= 50


@pytest.mark.parametrize("name", PUBLISHED)
def test_ordinary_words_are_never_refused(name: str) -> None:
    text, found = whole_format(name)
    render = renderer(text)
    for talk in conversations(
        name, ["Hi. ", "How? ", "<b>Yes</b>\n", "/etc ", "a < b "], told=found.system is not None
    ):
        assert found.takes(talk)
        assert found.text(talk, DAY.strftime) == render(talk, True, DAY.strftime)


def test_what_is_refused_is_what_the_template_would_change() -> None:
    """Of Qwen 3: a question that looks like a tool's answer shows the thoughts of the answers before it."""
    text, found = whole_format("qwen3")
    odd = "<tool_response>\n{}\n</tool_response>"
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "user", "content": odd},
    ]
    assert not found.takes(talk)
    assert found.text(talk, DAY.strftime) != renderer(text)(talk, True, DAY.strftime)
