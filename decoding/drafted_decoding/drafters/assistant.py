"""Drafts from the build's own assistant, which reads the model's caches and its last hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from drafted_decoding.drafters.base import EMPTY, PLAIN, Draft, RequestInfo


class AssistantEngine(Protocol):
    """An engine that runs an assistant; see shardmill.runtime.drafter."""

    def draft(self, token: int, position: int, count: int) -> tuple[list[int], list[float]]:
        """Return at most `count` tokens to follow the model's newest token, and the probability of each."""


class AssistantDrafter:
    """A drafter that proposes what an assistant finds likeliest. It keeps nothing: all it reads is the model's."""

    name, beyond = "assistant", True

    def __init__(self, engine: AssistantEngine) -> None:
        self._engine = engine

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """See `Drafter`."""

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`."""
        if limit < 1:
            return EMPTY
        tokens, probabilities = self._engine.draft(context[-1], len(context) - 1, limit)
        return Draft(tuple(tokens), tuple(probabilities))

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """See `Drafter`."""

    def finish(self) -> None:
        """See `Drafter`."""
