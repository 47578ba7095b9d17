"""The log-probabilities of a prompt: transformers' numbers wherever passes end, and their forms."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import limits
import numpy as np
import program_forms
import pytest
import tiny
import torch
from tokenizers import processors

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.machine import is_portable
from shardmill.serve.model import Limits, Settings

from .fake import END, NAME, Answerer, Speaker, fake_model
from .running import Running, ask, running

ONE = limits.logprobs(limits.model(tiny.LAYERS, tiny.FFN), 2, tiny.VOCAB)
JSON = {"Content-Type": "application/json"}
SLIDING = Settings(port=0, context_policy="slide", limits=Limits(prompt_tokens=200))
TEXT = "naïve 東京 🙂"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_model(), Settings(port=0, limits=Limits(max_tokens=100))) as up:
        yield up


def echoed(server: Running, **body: Any) -> dict[str, Any]:
    """The first choice of a prompt that is scored and not continued."""
    status, answer = server.post(ask(**{"echo": True, "logprobs": 2, "max_tokens": 0, **body}))
    assert status == 200, answer
    return dict(answer["choices"][0])


@pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
@pytest.mark.parametrize("length", [1, 2, 4, 5, 9, 47])
def test_a_prompt_has_transformers_log_probabilities(built: tiny.Build, fp32: None, length: int) -> None:
    """In passes of up to four tokens and two slices of the head; again when the engine holds or has kept the text."""
    model = replace(
        fake_model(), engine=program_forms.load(built), tokenizer=read_tokenizer(built.source / "tokenizer.json")
    )
    witness = tiny.transformers_model(built.source, tiny.dequantised(built))
    prompt = [*built.text[:length]]
    with torch.no_grad():
        rows = witness(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    expected = [float(rows[i - 1, token]) for i, token in enumerate(prompt) if i]
    best = rows[:-1].topk(2)
    with running(model) as server:
        first = echoed(server, prompt=prompt, prompt_logprobs=1)
        held = echoed(server, prompt=prompt, prompt_logprobs=1)
        server.post(ask(prompt="another text", max_tokens=2))
        kept = echoed(server, prompt=prompt, prompt_logprobs=1)
    assert first == held == kept
    said, told = first["logprobs"], first["prompt_logprobs"]
    assert said["token_logprobs"][0] is said["top_logprobs"][0] is told[0] is None
    assert len(said["token_logprobs"]) == len(told) == length
    for i, token in enumerate(prompt[1:], 1):
        limits.numbers_agree("the prompt", said["token_logprobs"][i], expected[i - 1], ONE, size=1)
        limits.numbers_agree("the likeliest", max(said["top_logprobs"][i].values()), best.values[i - 1, 0], ONE, size=1)
        assert told[i][str(token)]["logprob"] == said["token_logprobs"][i]
        assert told[i][str(token)]["rank"] == 1 + int((rows[i - 1] > rows[i - 1, token]).sum())
        assert [one["rank"] for one in told[i].values() if one["rank"] == 1] == [1]
        assert str(int(best.indices[i - 1, 0])) in told[i] and len(told[i]) <= 2


def test_a_crowd_gets_what_each_gets_alone(server: Running) -> None:
    """To the last bit, among prompts that begin alike and answers of several tokens."""
    asked = [
        ask(prompt="the same beginning, " * 3 + str(i), echo=True, logprobs=3, max_tokens=i % 3) for i in range(12)
    ]
    alone = [server.post(one)[1]["choices"] for one in asked]
    with ThreadPoolExecutor(12) as pool:
        together = [answer["choices"] for _, answer in pool.map(server.post, asked)]
    assert together == alone


class Counting(Speaker):
    """Counts the rows of logits that somebody still holds when a pass begins."""

    most = 0

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        self.most = max(self.most, sum(one() is not None for one in self.given))
        rows = super().forward(tokens, slots, positions)
        self.given.append(weakref.ref(rows))
        return rows

    def reset(self) -> None:
        super().reset()
        self.given: list[weakref.ref[Any]] = []


def test_the_logits_of_a_prompt_are_not_held() -> None:
    """But those of one pass: a long prompt has as many rows of V numbers as tokens."""
    engine = Counting()
    with running(fake_model(engine)) as server:
        assert len(echoed(server, prompt="x" * 200)["logprobs"]["tokens"]) == 200
    assert 0 < engine.most <= 2


@pytest.mark.parametrize("prompt", [TEXT, [*fake_model().encode(TEXT)]], ids=["text", "tokens"])
@pytest.mark.parametrize("count", [0, 5])
def test_an_echo_is_the_prompt_and_then_the_answer(server: Running, prompt: Any, count: int) -> None:
    """In texts, in tokens, and in where each of them begins; a stream has the same in pieces."""
    body = ask(prompt=prompt, echo=True, logprobs=1, max_tokens=count)
    answer = server.post(body)[1]
    alone = server.post(ask(prompt=prompt, logprobs=1, max_tokens=count))[1]["choices"][0] if count else None
    (choice,), length = answer["choices"], len(TEXT.encode())
    assert choice["text"] == TEXT + (alone["text"] if alone else "")
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == count
    rows = choice["logprobs"]
    assert all(len(top) == 1 for top in rows["top_logprobs"][1:])
    assert server.post({**body, "prompt_logprobs": 3})[1]["choices"][0]["logprobs"] == rows
    assert {len(rows[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {length + count}
    for byte, offset in zip(range(length), rows["text_offset"], strict=False):
        assert offset == len(TEXT.encode()[:byte].decode(errors="ignore"))
    if alone:
        assert rows["token_logprobs"][length:] == alone["logprobs"]["token_logprobs"]
        assert rows["text_offset"][length:] == [len(TEXT) + one for one in alone["logprobs"]["text_offset"]]
    _, _, streamed = server.request("POST", "/v1/completions", json.dumps({**body, "stream": True}).encode(), JSON)
    chunks = [json.loads(event[6:])["choices"][0] for event in streamed.decode().split("\n\n")[:-2]]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    pieces = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    assert {name: sum((piece[name] for piece in pieces), []) for name in rows} == rows


def test_an_echo_without_log_probabilities_is_the_text_alone(server: Running) -> None:
    """Of each prompt, for each of its choices; no token has to run for it again."""
    status, answer = server.post(ask(prompt=["one", "two"], n=2, echo=True, max_tokens=3))
    assert status == 200 and [one["text"][:3] for one in answer["choices"]] == ["one", "one", "two", "two"]
    assert all(one["logprobs"] is None and len(one["text"]) >= 4 for one in answer["choices"])
    cached = [server.post(ask(prompt="one", echo=True))[1]["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert cached[1] == {"cached_tokens": 2}


@pytest.mark.parametrize("before", ["", "<|end|> $A"])
def test_a_token_before_the_text_takes_no_characters_of_it(before: str) -> None:
    """It has a place among the tokens, since the model has seen it."""
    tokenizer = fake_model().tokenizer.from_str(fake_model().tokenizer.to_str())
    if before:
        tokenizer.post_processor = processors.TemplateProcessing(single=before, special_tokens=[("<|end|>", END)])
    with running(replace(fake_model(), tokenizer=tokenizer)) as server:
        choice = echoed(server, prompt="abc")
    added = ["<|end|>"] if before else []
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == [*added, "a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [*([0] if added else []), 0, 1, 2]


def test_after_a_prompt_the_token_that_ends_the_answer_is_told() -> None:
    """The harness asks for one token more and drops the last: it would drop a token of the prompt."""
    with running(fake_model(Answerer("", opening="over"))) as server:
        choice = echoed(server, prompt="it is over", max_tokens=1)
        assert choice["finish_reason"] == "stop" and choice["text"] == "it is over"
        assert len(choice["logprobs"]["tokens"]) == 11 and choice["logprobs"]["tokens"][-1] == "<|end|>"
        plain = server.post(ask(prompt="it is over", max_tokens=1, logprobs=1))[1]["choices"][0]
        assert plain["logprobs"]["tokens"] == []


def test_a_chat_has_the_log_probabilities_of_its_prompt(server: Running) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "prompt_logprobs": 0}
    status, answer = server.post(body, "/v1/chat/completions")
    told = answer["prompt_logprobs"]
    assert (
        status == 200
        and "".join(next(iter(one.values()))["decoded_token"] for one in told[1:]) == ("user: x\nassistant: "[1:])
    )
    assert all(len(one) == 1 for one in told[1:]) and "prompt_logprobs" not in answer["choices"][0]


def test_a_slid_context_scores_every_token() -> None:
    """Each by what it sees, wherever passes end."""
    with running(fake_model(Speaker(slots=64)), SLIDING) as server:
        long = echoed(server, prompt="abcdefgh" * 15)
        assert long == echoed(server, prompt="abcdefgh" * 15)
    assert len(long["logprobs"]["tokens"]) == 120 and None not in long["logprobs"]["token_logprobs"][1:]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 asks for no token: it needs echo or prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: "),
        ({"prompt_logprobs": -1}, "prompt_logprobs: "),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not streamed: leave out stream"),
        ({"echo": "x"}, "echo: "),
        ({"echo": True, "max_tokens": 0, "prompt": "x" * 300}, "maximum context length"),
    ],
    ids=str,
)
def test_what_can_not_be_scored_is_a_400(server: Running, body: dict[str, Any], says: str) -> None:
    status, answer = server.post(ask(**body))
    assert status == 400 and says in answer["error"]["message"], answer
    assert np.isfinite(server.metric("shardmill_running"))
