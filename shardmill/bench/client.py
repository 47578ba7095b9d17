"""Sends requests to a running server and reads their costs from the server's own figures.

Requests are greedy and private: a drafter that learns keeps nothing between requests, so repeating a prompt does not
make it easier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from shardmill.bench.server import Server
from shardmill.errors import ShardmillError

Joules = Callable[[], float]  # joules used since some moment


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        drafted, accepted, pass_seconds: per decode pass; the seconds are the engine's.
        verified_again: rows that the exactness guard ran again alone.
        cached: prompt tokens that were reused from the previous request's KV cache.
        decode_seconds: from the end of the prefill, which gives the first token, to the last token.
        wall_seconds, joules: of the whole request, measured by the client; joules needs a meter.
    """

    tokens: tuple[int, ...]
    finish_reason: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    pass_seconds: tuple[float, ...]
    verified_again: int
    prompt_tokens: int
    cached: int
    prefill_seconds: float
    decode_seconds: float
    drafter_seconds: float
    wall_seconds: float
    joules: float | None

    @property
    def decoded(self) -> int:
        """Return the number of tokens from decoding; the first token comes from the prefill."""
        return len(self.tokens) - 1

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds per decoded token."""
        return self.decode_seconds / self.decoded


class Client:
    """A client of one server that sends one request at a time."""

    def __init__(self, model: str, http: httpx2.Client, joules: Joules | None = None) -> None:
        self._model, self._http, self._joules = model, http, joules

    def ask(self, prompt: tuple[int, ...], new_tokens: int, drafter: str) -> Answer:
        """Request the model's continuation of a prompt.

        Raises:
            ShardmillError: the server refuses the request or is gone.
        """
        body = self._body(prompt, new_tokens, drafter)
        before, start = self._joules and self._joules(), time.perf_counter()
        content = self._post("/v1/completions", body)
        seconds, after = time.perf_counter() - start, self._joules and self._joules()
        return answer(content, seconds, None if before is None or after is None else after - before)

    def margin(self, prompt: tuple[int, ...], at: int) -> float | None:
        """Return how close the two best logits are at token `at`, from 0 on, of the answer to `prompt` at T = 1.

        Return None if both tokens have the same text: the server then lists only one.
        """
        body = self._body(prompt, at + 1, "none") | {"logprobs": 2}
        (choice,) = self._post("/v1/completions", body)["choices"]
        best = sorted(choice["logprobs"]["top_logprobs"][at].values())[-2:]
        return best[1] - best[0] if len(best) > 1 else None

    def forget(self, prompt: tuple[int, ...]) -> None:
        """Make the server drop everything that `prompt` could reuse."""
        self.ask((1,) if prompt[0] == 0 else (0,), 1, "none")

    def _body(self, prompt: tuple[int, ...], new_tokens: int, drafter: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0,
            "shardmill": {"drafter": drafter, "private": True, "figures": True},
        }

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = self._http.post(path, json=body)
        except httpx2.HTTPError as error:
            raise ShardmillError(f"the server is gone: {error}; check memory, and run it by hand") from error
        content: dict[str, Any] = response.json()
        if response.is_error:
            raise ShardmillError(f"the server refused a request: {content['error']['message']}")
        return content


def answer(content: dict[str, Any], seconds: float, joules: float | None) -> Answer:
    """Build an Answer from the server's JSON."""
    figures, usage = content["shardmill"], content["usage"]
    return Answer(
        tokens=tuple(figures["tokens"]),
        finish_reason=figures["finish_reason"],
        drafted=tuple(figures["drafted"]),
        accepted=tuple(figures["accepted"]),
        pass_seconds=tuple(figures["pass_seconds"]),
        verified_again=figures["verified_again"],
        prompt_tokens=usage["prompt_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        prefill_seconds=figures["prefill_seconds"],
        decode_seconds=figures["decode_seconds"],
        drafter_seconds=figures["drafter_seconds"],
        wall_seconds=seconds,
        joules=joules,
    )


@contextmanager
def connected(server: Server, joules: Joules | None = None) -> Iterator[Client]:
    """Yield a client of `server`; it waits for an answer without a timeout, and uses no proxy."""
    with httpx2.Client(base_url=server.url, timeout=None, trust_env=False) as http:
        yield Client(server.model, http, joules)
