"""The benchmark's arithmetic and its honesty: exact output, lengths without room named, speculation really used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from shardmill.bench import speed
from shardmill.config import Benchmark
from shardmill.decode import Session


class Counter:
    """An engine that says (last token + 1) mod 7, so that a text of 0 1 2 ... 6 repeated is what it expects."""

    vocab, widths = 7, (1, 4)

    def __init__(self, slots: int = 256) -> None:
        self.slots, self.calls = slots, list[int]()

    def reset(self) -> None:
        """Nothing is held."""

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing is held."""

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        assert len(tokens) in self.widths
        assert max(slots) < self.slots
        self.calls.append(len(tokens))
        return np.eye(7, dtype=np.float32)[[(t + 1) % 7 for t in tokens]]


TEXT = list(range(7))


def settings(**changes: Any) -> Benchmark:
    return Benchmark(**{"prompt_tokens": (20, 40), "new_tokens": 16, "repetitions": 2, **changes})


@pytest.mark.parametrize("length", [1, 6, 7, 8, 14, 20])
def test_a_text_is_repeated_to_exactly_the_length(length: int) -> None:
    assert speed.tile(TEXT, length) == [i % 7 for i in range(length)]


def test_a_row_per_length_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    result = speed.sweep(Counter(), TEXT, settings(prompt_tokens=(20, 40, 400)))
    assert [row["prompt_tokens"] for row in result["rows"]] == [20, 40]
    assert result["not_run"] == {"400": "context has room for 236 prompt tokens"}
    for row in result["rows"]:
        assert row["exact"] is True
        assert row["new_tokens"] == 16
        assert row["speedup"] == pytest.approx(row["ngram_tok_s"] / row["decode_tok_s"])
        assert min(row["decode_tok_s"], row["prefill_tok_s"], row["ngram_tok_s"]) > 0
    json.dumps(result)


def test_speculation_takes_fewer_passes_on_a_text_that_repeats() -> None:
    (row,) = speed.sweep(Counter(), TEXT, settings(prompt_tokens=(40,)))["rows"]
    assert row["tokens_per_pass"] > 2
    assert 0.5 < row["acceptance"] <= 1


def test_prefill_is_chunked_and_decoding_is_one_token_a_pass() -> None:
    engine = Counter()
    speed.generate_once(Session(engine), speed.tile(TEXT, 40), 16, "none")
    assert engine.calls == [4] * 10 + [1] * 15


def test_a_wrong_token_is_not_called_exact() -> None:
    """Speculation that changes the output is reported, not averaged away."""

    class Wider(Counter):
        def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
            logits = super().forward(tokens, slots, positions)
            decoding = positions[0] >= 40
            return np.roll(logits, 1, axis=1) if decoding and len(tokens) > 1 else logits

    (row,) = speed.sweep(Wider(), TEXT, settings(prompt_tokens=(40,)))["rows"]
    assert row["exact"] is False


@pytest.mark.parametrize("slots", [8, 19, 20, 24])
def test_a_context_without_room_is_reported_and_nothing_measured(slots: int) -> None:
    result = speed.sweep(Counter(slots), TEXT, settings())
    room = max(slots - 16 - 4, 0)
    assert result["rows"] == []
    assert result["prefill_over_decode"] is None
    assert result["not_run"] == {n: f"context has room for {room} prompt tokens" for n in ("20", "40")}


def test_a_rate_needs_two_tokens() -> None:
    """The first token comes out of the prefill, so one token says nothing of decoding: the config asks for two."""
    (row,) = speed.sweep(Counter(), TEXT, settings(prompt_tokens=(20,), new_tokens=2))["rows"]
    assert row["new_tokens"] == 2
    with pytest.raises(ValidationError, match="new_tokens"):
        settings(new_tokens=1)


@dataclass(frozen=True)
class Result:
    tokens: tuple[int, ...]
    decode_seconds: float


def test_the_first_token_is_the_prefill_s() -> None:
    assert speed.speed(Result((1, 2, 3, 4, 5), 2.0)) == 2.0  # type: ignore[arg-type]
