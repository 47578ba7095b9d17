"""Requests as the benchmark needs them, and errors of the server in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from patience import PATIENCE
from serve.running import running

from shardmill.bench.server import Client
from shardmill.errors import ShardmillError

from .scripted import NAME, model


def client(handle: Callable[[httpx2.Request], httpx2.Response], joules: Callable[[], float] | None = None) -> Client:
    return Client("m", httpx2.Client(base_url="http://x", transport=httpx2.MockTransport(handle)), joules)


def answered(**figures: Any) -> dict[str, Any]:
    """An answer's JSON."""
    known = {
        "tokens": [4, 5],
        "finish_reason": "length",
        "drafted": [1],
        "accepted": [0],
        "pass_seconds": [0.2],
        "verified_again": 1,
    }
    seconds = {"prefill_seconds": 0.5, "decode_seconds": 0.25, "drafter_seconds": 0.125}
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    return {"usage": usage, "shardmill": known | seconds | figures}


def test_requests_are_greedy_private_and_ask_for_figures() -> None:
    """Private: else a drafter that learns has seen the answer the second time."""
    seen = list[Any]()

    def handle(request: httpx2.Request) -> httpx2.Response:
        seen.append((request.url.path, json.loads(request.content)))
        return httpx2.Response(200, json=answered())

    got = client(handle).ask((1, 2, 3), 7, "suffix")
    extension = {"drafter": "suffix", "private": True, "figures": True}
    asked = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "temperature": 0, "shardmill": extension}
    assert seen == [("/v1/completions", asked)]
    assert (got.tokens, got.cached, got.decode_seconds, got.pass_seconds, got.decoded) == ((4, 5), 2, 0.25, (0.2,), 1)
    assert got.joules is None


def test_energy_is_that_of_the_request() -> None:
    readings = iter([10.0, 12.5])
    got = client(lambda _: httpx2.Response(200, json=answered()), lambda: next(readings)).ask((1,), 2, "none")
    assert got.joules == 2.5


def test_how_close_a_token_was_is_asked_of_plain_decoding() -> None:
    seen = list[Any]()

    def handle(request: httpx2.Request) -> httpx2.Response:
        seen.append(json.loads(request.content))
        return httpx2.Response(200, json={"choices": [{"logprobs": {"top_logprobs": tops}}]})

    tops: list[dict[str, float]] = [{"a": -0.1, "b": -3.0}, {"b": -0.75, "a": -0.5, "c": -4.0}]
    assert client(handle).margin((1, 2), 1) == 0.25
    assert (seen[0]["logprobs"], seen[0]["max_tokens"], seen[0]["shardmill"]["drafter"]) == (2, 2, "none")
    tops[1] = {"b": -0.75}  # two tokens of the same text
    assert client(handle).margin((1, 2), 1) is None


def test_what_the_server_says_is_passed_on() -> None:
    refusal = httpx2.Response(400, json={"error": {"message": "no drafter is called x"}})
    with pytest.raises(ShardmillError, match="^the server refused a request: no drafter is called x$"):
        client(lambda _: refusal).ask((1,), 2, "x")


def test_a_server_that_died_is_one_line() -> None:
    def handle(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ReadError("connection reset", request=request)

    with pytest.raises(ShardmillError, match="^the server is gone: connection reset"):
        client(handle).ask((1,), 2, "none")


@pytest.mark.parametrize("prompt", [(0, 1, 2, 3), (3, 4, 5, 6)])
def test_after_forgetting_nothing_is_reused(prompt: tuple[int, ...]) -> None:
    """The prefill is then of the whole prompt, and its time too, also where it runs in steps of 64 tokens."""
    prompt = prompt * 40
    with running(model()) as server:
        http = httpx2.Client(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=PATIENCE)
        asking = Client(NAME, http)
        assert [asking.ask(prompt, 4, "none").cached for _ in range(2)] == [0, len(prompt) - 1]
        asking.forget(prompt)
        assert asking.ask(prompt, 4, "none").cached == 0
