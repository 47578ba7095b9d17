"""Chat completions, and what has no chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from drafted_decoding import GrammarTokenizer

from .fake import NAME, fake_model
from .running import Running, ask, running

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
RENDERED = "system: Be brief.\nuser: Who are you?\nassistant: "


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_model()) as up:
        yield up


def say(server: Running, **more: Any) -> Any:
    request: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 30, "temperature": 0, **more}
    return server.client().chat.completions.create(**request)


def test_an_answer_continues_the_rendered_template(server: Running) -> None:
    """The prompt is the template's text, and the message what plain completion says after it."""
    expected = server.client().completions.create(**ask(prompt=RENDERED, max_tokens=30))
    answer = say(server)
    assert answer.choices[0].message.content == expected.choices[0].text
    assert answer.choices[0].message.role == "assistant" and answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == len(RENDERED)


def test_a_stream_is_the_same_message(server: Running) -> None:
    """The role comes first, then the content, then the finish reason."""
    deltas = [chunk.choices[0] for chunk in say(server, stream=True)]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == say(server).choices[0].message.content
    assert deltas[-1].finish_reason == "length" and deltas[-1].delta.content is None


def test_parts_and_developer_messages_are_understood(server: Running) -> None:
    """Newer spellings of the same conversation ask the same."""
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        MESSAGES[1],
    ]
    answer = say(server, messages=parts, max_completion_tokens=30, max_tokens=None)
    assert answer.choices[0].message.content == say(server).choices[0].message.content


def test_an_answer_can_be_sent_back(server: Running) -> None:
    """The client's own message object is accepted in the next turn, whose prefix is then reused."""
    first = say(server).choices[0].message
    answer = say(server, messages=[*MESSAGES, first, {"role": "user", "content": "And?"}])
    assert answer.usage.prompt_tokens_details.cached_tokens > len(RENDERED)


def test_logprobs_of_a_message(server: Running) -> None:
    """As many likeliest tokens as were asked for, with bytes that join to the text though tokens split characters."""
    answer = say(server, logprobs=True, top_logprobs=2, max_tokens=60)
    rows = answer.choices[0].logprobs.content
    assert len(rows) == 60 and all(len(row.top_logprobs) == 2 for row in rows)
    assert all(row.logprob == row.top_logprobs[0].logprob for row in rows)  # greedy
    spelled = bytes(byte for row in rows for byte in row.bytes).decode(errors="replace")
    assert spelled == answer.choices[0].message.content
    streamed = [c.choices[0].logprobs for c in say(server, logprobs=True, top_logprobs=2, max_tokens=60, stream=True)]
    assert [row for piece in streamed if piece is not None for row in piece.content] == rows


def test_json_schema_is_obeyed(server: Running) -> None:
    """An engine that speaks nonsense gives JSON of the schema, and ends there."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = say(server, response_format=wanted, max_tokens=100)
    assert json.loads(answer.choices[0].message.content)["ok"] in (True, False)
    assert answer.choices[0].finish_reason == "stop"


def test_json_is_compact_and_its_tokenizer_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that loves blanks has no place to write them; many requests at once prepare one tokenizer."""
    pytest.importorskip("llguidance")
    made = []

    def prepare(*arguments: Any, **settings: Any) -> GrammarTokenizer:
        made.append(arguments)
        return GrammarTokenizer(*arguments, **settings)

    monkeypatch.setattr("shardmill.serve.model.GrammarTokenizer", prepare)
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    wanted = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    with running(fake_model()) as up, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda seed: say(up, response_format=wanted, max_tokens=60, seed=seed), range(4)))
    for answer in answers:
        text = answer.choices[0].message.content
        assert text == json.dumps(json.loads(text), separators=(",", ":"))
    assert len(made) == 1


def test_pictures_are_refused(server: Running) -> None:
    """By what a message may hold, not by the first form that it has not."""
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="messages.0.content: this model takes no images: send text alone"):
        say(server, messages=[{"role": "user", "content": picture}])


@pytest.mark.parametrize("schema", [{"type": "no such type"}, {"type": "string", "pattern": "a["}])
def test_an_impossible_schema_is_refused(server: Running, schema: dict[str, str]) -> None:
    """The grammar library's complaint becomes a 400 in one line."""
    pytest.importorskip("llguidance")
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="JSON schema") as caught:
        say(server, response_format=wanted)
    assert "\n" not in caught.value.body["message"]  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="needs json_schema"):
        say(server, response_format={"type": "json_schema"})


def test_a_schema_that_the_library_cannot_read_is_refused(server: Running) -> None:
    """Half of a surrogate pair, which JSON can hold and UTF-8 cannot, is the client's fault."""
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "\ud800"}}}
    status, answer = server.post(ask(response_format=wanted))
    assert status == 400 and answer["error"]["message"].startswith("response_format: JSON schema rejected: ")


def test_a_template_may_refuse(server: Running) -> None:
    """What a template raises is the client's to read."""
    with pytest.raises(openai.BadRequestError, match="the first message must be the user's"):
        say(server, messages=[{"role": "assistant", "content": "Hello"}])


def test_without_a_template_there_is_no_chat() -> None:
    """A clear 400 that names what works instead, which does."""
    with running(fake_model(chat=False)) as server:
        with pytest.raises(openai.BadRequestError, match="no chat template: use /v1/completions") as caught:
            say(server)
        assert caught.value.code == "no_chat_template"
        assert server.client().completions.create(**ask()).choices[0].text
