"""What clients of vLLM send: ends of an answer, its form, and the tokens of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardmill.templates.render import Renderer

from .fake import END, NAME, Reciter, Speaker, byte_tokenizer, fake_model
from .running import Running, ask, running
from .templates import LLAMA

CLOSED = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TEXT = "Once upon a time there was a fox. It ran."


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Ends after its text, and goes on with ends if it may not end."""
    with running(fake_model(Reciter(TEXT))) as up:
        yield up


def told(server: Running, **more: Any) -> tuple[str, str, int]:
    """Text, reason and number of tokens of a completion."""
    status, answer = server.post(ask(**{"prompt": TEXT[:4], "max_tokens": 60, **more}))
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]


def token(character: str) -> int:
    (found,) = byte_tokenizer().encode(character).ids
    return int(found)


@pytest.mark.parametrize(
    ("more", "text", "reason"),
    [
        ({}, TEXT[4:], "stop"),
        ({"stop_token_ids": [token("."), token("w")]}, TEXT[4 : TEXT.index("w")], "stop"),
        ({"stop": ["fox", "was a fox."]}, TEXT[4 : TEXT.index("fox")], "stop"),
        ({"stop": ["fox"], "include_stop_str_in_output": True}, TEXT[4 : TEXT.index("fox") + 3], "stop"),
        ({"stop": ["was", "was a fox"], "include_stop_str_in_output": True}, TEXT[4 : TEXT.index("was") + 3], "stop"),
        ({"stop": ["nowhere"], "include_stop_str_in_output": True}, TEXT[4:], "stop"),
        ({"ignore_eos": True}, TEXT[4:], "length"),
        ({"ignore_eos": True, "stop_token_ids": [END]}, TEXT[4:], "stop"),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_an_answer_ends_where_the_request_says(
    server: Running, more: dict[str, Any], text: str, reason: str, drafter: str
) -> None:
    found = told(server, **more, shardmill={"drafter": drafter})
    assert found[:2] == (text, reason)
    assert reason == "stop" or found[2] == 60


def test_a_token_that_ends_an_answer_is_not_reported(server: Running) -> None:
    """As the usual ones are not; one that is ignored is."""
    for more, count in (({"stop_token_ids": [token("w")]}, TEXT.index("w") - 4), ({"ignore_eos": True}, 60)):
        _, answer = server.post(ask(prompt=TEXT[:4], max_tokens=60, logprobs=0, **more))
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == count


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_it_has_at_least_as_many_tokens_as_asked_for(server: Running, drafter: str, logprobs: int | None) -> None:
    """The tokens that end an answer are forbidden until then, and free afterwards."""
    usual = told(server)[2]
    more: dict[str, Any] = {"shardmill": {"drafter": drafter}, "logprobs": logprobs}
    assert told(server, min_tokens=usual - 1, **more)[2] == usual
    text, reason, count = told(server, min_tokens=usual + 5, **more)
    assert text.startswith(TEXT[4:]) and reason == "stop" and count == usual + 6


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("form", "matched"),
    [
        ({"regex": "[0-9]{3}-[0-9]{2}"}, r"\d{3}-\d{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"json": CLOSED}, r'\{"a":(true|false)\}'),
    ],
    ids=["regex", "choice", "json"],
)
def test_an_answer_has_the_form_that_was_asked_for(server: Running, form: Any, matched: str, chat: bool) -> None:
    if not chat:
        assert re.fullmatch(matched, told(server, structured_outputs=form)[0])
        return
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "structured_outputs": form}
    status, answer = server.post(body, "/v1/chat/completions")
    assert status == 200 and re.fullmatch(matched, answer["choices"][0]["message"]["content"]), answer


@pytest.mark.parametrize(
    ("more", "says", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs takes one of json, regex and choice", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "takes one of", "structured_outputs"),
        ({"structured_outputs": {"regex": "a["}}, "structured_outputs: ", "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: ", "structured_outputs"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice.0: ", "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs: ", "structured_outputs"),
        ({"structured_outputs": {"grammar": "root"}}, "'grammar' is not supported", "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "leave out one", None),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "leave out one", "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0: ", "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens: ", "min_tokens"),
    ],
    ids=str,
)
def test_what_says_two_things_or_none_is_named(
    server: Running, more: dict[str, Any], says: str, param: str | None
) -> None:
    status, answer = server.post(ask(**more))
    assert (status, answer["error"]["param"]) == (400, param) and says in answer["error"]["message"], answer


def test_a_text_is_split_and_joined(server: Running) -> None:
    """Also a conversation, as its template renders it."""
    status, found = server.post({"prompt": "aé<|end|>", "return_token_strs": True}, "/tokenize")
    expected = byte_tokenizer().encode("aé<|end|>").ids
    assert (status, found["tokens"], found["count"]) == (200, expected, 4)
    assert found["token_strs"] == ["a", "\ufffd", "\ufffd", "<|end|>"] and found["max_model_len"] == 512
    assert server.post({"tokens": expected}, "/detokenize") == (200, {"prompt": "aé<|end|>"})
    status, found = server.post({"model": NAME, "messages": [{"role": "user", "content": "Hi"}]}, "/tokenize")
    assert found["tokens"] == byte_tokenizer().encode("user: Hi\nassistant: ").ids


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Renders conversations by a real template, which trims, as Llama's does."""
    folder = tmp_path_factory.mktemp("source")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": LLAMA}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    with running(replace(fake_model(Speaker(slots=512)), template=Renderer(folder, None))) as up:
        yield up


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, "said so far<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        ({"add_generation_prompt": True}, "said so far<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        ({"add_generation_prompt": False}, "said so far<|eot_id|>"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "said so far"),
        ({"continue_final_message": True}, "said so far"),
        ({"continue_final_message": False}, "said so far<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", [False, True])
def test_a_given_answer_is_continued(rendering: Running, more: dict[str, bool], end: str, parts: bool) -> None:
    """As vLLM does: the answer has what follows alone, which is what follows the same text in a completion."""
    content: Any = [{"type": "text", "text": "said so "}, {"type": "text", "text": "far"}] if parts else "said so far"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    _, found = rendering.post({"messages": messages, **more}, "/tokenize")
    text = rendering.post({"tokens": found["tokens"]}, "/detokenize")[1]["prompt"]
    head = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    assert text == head + "<|start_header_id|>assistant<|end_header_id|>\n\n" + end
    body = {"model": NAME, "messages": messages, "max_tokens": 9, "temperature": 0, **more}
    status, answer = rendering.post(body, "/v1/chat/completions")
    alone = rendering.post(ask(prompt=found["tokens"], max_tokens=9))[1]["choices"][0]["text"]
    assert status == 200 and answer["choices"][0]["message"]["content"] == alone


@pytest.mark.parametrize(
    ("last", "more", "says"),
    [
        ({"role": "user", "content": "x"}, {}, "needs a last message of role assistant with text"),
        ({"role": "assistant", "content": ""}, {}, "needs a last message of role assistant with text"),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {},
            "text alone",
        ),
        ({"role": "assistant", "content": "x"}, {"add_generation_prompt": True}, "add_generation_prompt begins one"),
    ],
    ids=str,
)
def test_what_can_not_be_continued_is_named(
    rendering: Running, last: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}, last], "continue_final_message": True}
    for path in ("/v1/chat/completions", "/tokenize"):
        status, answer = rendering.post({**body, **more}, path)
        assert status == 400 and says in answer["error"]["message"], answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_has_the_usage_so_far(rendering: Running, path: str) -> None:
    """Of all choices; the last chunk has the whole usage, which the one before already told."""
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": ["Hi", "Ho"]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {
        "model": NAME,
        **prompt,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 5,
        "n": 2,
        "stream": True,
        "stream_options": options,
    }
    *_, streamed = rendering.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    chunks = [json.loads(event[6:])["usage"] for event in streamed.decode().split("\n\n")[:-2]]
    told = [one["completion_tokens"] for one in chunks]
    assert told == sorted(told) and told[-1] == told[-2] == (10 if "chat" in path else 20) and len({*told}) > 2
    assert {one["prompt_tokens"] for one in chunks} == {chunks[-1]["prompt_tokens"]}
    assert all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in chunks)
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": False}
    *_, plain = rendering.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    events = [json.loads(event[6:]) for event in plain.decode().split("\n\n")[:-2]]
    assert all(one["usage"] is None for one in events[:-1]) and events[-1]["usage"]["completion_tokens"] == told[-1]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/tokenize", {}, 400, "give prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "give prompt or messages"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "'other' is not served here"),
        ("/tokenize", {"messages": [{"role": "assistant", "content": "b"}]}, 400, "the chat template refused"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "not valid Unicode"),
        ("/detokenize", {"tokens": [257]}, 400, "257 is no token: the vocabulary has 257"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0: "),
        ("/detokenize", {"model": "other", "tokens": [1]}, 404, "'other' is not served here"),
    ],
    ids=str,
)
def test_what_cannot_be_split_or_joined_is_named(
    server: Running, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    found, answer = server.post(body, path)
    assert found == status and says in answer["error"]["message"], answer
