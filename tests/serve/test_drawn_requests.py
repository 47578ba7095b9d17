"""Requests that nobody would think of, drawn by hypothesis: each is answered, or refused in OpenAI's form.

`pytest tests/serve/test_drawn_requests.py --requests 3000` draws more of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.serve.model import Limits, Settings
from shardmill.serve.requests import ChatRequest, CompletionRequest

from .fake import NAME, fake_model
from .running import Running, ask, running

LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=12), st.binary().map(repr)
)
VALUE = st.recursive(LEAF, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4))
TEXT = st.text(st.characters(), min_size=1, max_size=40)  # lone surrogates, too
TOKENS = st.lists(st.integers(-2, 260), max_size=12)
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just(NAME),
    "prompt": TEXT | TOKENS,
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT}),
        max_size=3,
    ),
    "max_tokens": st.integers(0, 9),
    "max_completion_tokens": st.integers(0, 9),
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 11),
    "presence_penalty": st.floats(-2.5, 2.5),
    "frequency_penalty": st.floats(-2.5, 2.5),
    "n": st.integers(0, 18),
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "logit_bias": st.dictionaries(st.integers(-1, 258).map(str), st.floats(-101, 101), max_size=3),
    "seed": st.integers(-(2**64), 2**65),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stream": st.booleans(),
    "logprobs": st.booleans() | st.integers(0, 21),
    "prompt_logprobs": st.integers(-1, 21),
    "echo": st.booleans(),
    "top_logprobs": st.integers(0, 21),
    "shardmill": st.fixed_dictionaries({"drafter": st.sampled_from(["none", "ngram", "suffix", "learned", ""])}),
}
ASKED = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: mostly fields that there are, with what they may hold; some with anything at all."""
    path = draw(st.sampled_from(list(ASKED)))
    if draw(st.integers(0, 19)) == 0:
        return path, draw(st.binary(max_size=60))
    fields = [field.alias or name for name, field in ASKED[path].model_fields.items()]
    given = {name: draw(SENSIBLE[name]) for name in fields if name in ("model", "prompt", "messages")}
    given["max_tokens"] = 5  # or an answer goes on to the end of the context
    if draw(st.booleans()):  # a prompt alone: half of all, so that answers are tried as well as refusals
        text = "prompt" if path == "/v1/completions" else "messages"
        given[text] = "word" if text == "prompt" else [{"role": "user", "content": draw(TEXT)}]
        return path, json.dumps(given).encode()
    for name in draw(st.lists(st.sampled_from(fields), max_size=5)):
        known = name in SENSIBLE and draw(st.integers(0, 3))
        given[name] = draw(SENSIBLE[name] if known else VALUE)
    if draw(st.integers(0, 9)) == 0:
        given[draw(st.text(max_size=8))] = draw(VALUE)
    return path, json.dumps(given).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = Limits(max_tokens=16, prompt_tokens=64, body_bytes=20_000)
    with running(fake_model(), Settings(port=0, limits=limits)) as up:
        yield up


def test_each_is_answered_or_refused_in_openais_form(server: Running, request: pytest.FixtureRequest) -> None:
    """No status of 500 or more, no connection that is cut, no answer that is no JSON, and the server lives on."""
    statuses: list[int] = []
    expected = server.post(ask(max_tokens=12))

    @settings(max_examples=request.config.getoption("requests"))
    @given(requests())
    def tried(drawn: tuple[str, bytes]) -> None:
        path, body = drawn
        status, headers, content = server.request("POST", path, body, {"Content-Type": "application/json"})
        statuses.append(status)
        assert status == 200 or 400 <= status < 500, content
        if status == 200 and headers["content-type"].startswith("text/event-stream"):
            lines = [line for line in content.decode().splitlines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]" and all("error" not in json.loads(one[6:]) for one in lines[:-1])
        elif status == 200:
            assert json.loads(content)["choices"]
        else:
            error = json.loads(content)["error"]
            assert {"message", "type", "param", "code"} == set(error) and error["message"].strip()
            assert "\n" not in error["message"] and error["message"].isprintable()

    tried()
    answered = statuses.count(200)
    assert answered > len(statuses) / 50 and len(statuses) - answered > len(statuses) / 50  # both were tried
    again = server.post(ask(max_tokens=12))
    assert (again[0], again[1]["choices"]) == (200, expected[1]["choices"])
