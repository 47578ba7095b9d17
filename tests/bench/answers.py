"""Answers by hand."""

from __future__ import annotations

from typing import Any

from shardmill.bench.prompts import Prompt
from shardmill.bench.server import TimedAnswer
from shardmill.bench.speed import Pair

PROMPT = Prompt("task", "1.txt", (1, 2, 3))


def answer(**changes: Any) -> TimedAnswer:
    """Five tokens in four passes of half a second."""
    fields: dict[str, Any] = {
        "tokens": (1, 2, 3, 4, 5),
        "finish_reason": "length",
        "drafted": (0, 0, 0, 0),
        "accepted": (0, 0, 0, 0),
        "pass_seconds": (0.5, 0.5, 0.5, 0.5),
        "verified_again": 0,
        "prompt_tokens": 3,
        "cached": 2,
        "prefill_seconds": 0.5,
        "decode_seconds": 2.0,
        "drafter_seconds": 0.0,
        "wall_seconds": 3.0,
        "joules": None,
    }
    return TimedAnswer(**fields | changes)


def pair(plain: TimedAnswer | None = None, prompt: Prompt = PROMPT, drafter: str = "ngram", **drafted: Any) -> Pair:
    """A pair; `drafted` changes the second answer."""
    return Pair(prompt, drafter, plain or answer(), answer(**drafted))
