"""The interface of drafters: proposed next tokens, each with a confidence.

The caller reports events: `reset` at the start of a request, `propose` before a pass, `observe` after it, `finish` at
the end. A drafter only affects speed, never which tokens come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Draft:
    """Proposed tokens.

    Attributes:
        tokens: the tokens, in order.
        confidence: per token, the estimated probability that it is right, given that the tokens before it are. May be
            empty, and must be empty if the tokens were drawn at random: if a draw's verification depended on its
            confidence, the draw would change the output.
        distributions: float [k, V], the distribution of each drawn token; None if the tokens were chosen, not drawn.
    """

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    distributions: NDArray[np.float64] | None = None


EMPTY = Draft()


def usable(draft: Draft, limit: int, vocab: int) -> Draft:
    """Return the part of `draft` that an engine can verify, so that no drafter can break decoding.

    It ends at `limit`, or before the first token outside the vocabulary. Confidences that do not fit the tokens are
    dropped. Drawn tokens can't be verified without fitting distributions; without them the result is empty.
    """
    tokens = draft.tokens[:limit]
    length = next((i for i, token in enumerate(tokens) if not 0 <= token < vocab), len(tokens))
    if draft.distributions is not None and draft.distributions.shape != (len(draft.tokens), vocab):
        return EMPTY
    sure = draft.confidence
    if sure and (len(sure) != len(draft.tokens) or not all(0 <= c <= 1 for c in sure)):
        draft = replace(draft, confidence=())
    return shorten(draft, length)


def shorten(draft: Draft, length: int) -> Draft:
    """Return the first `length` tokens of `draft`, with their confidences and distributions."""
    if length >= len(draft.tokens):
        return draft
    distributions = None if draft.distributions is None else draft.distributions[:length]
    return replace(
        draft, tokens=draft.tokens[:length], confidence=draft.confidence[:length], distributions=distributions
    )


@dataclass(frozen=True)
class RequestInfo:
    """Facts about a request for a drafter.

    Attributes:
        private: the drafter may keep nothing of the request, and use nothing kept from other requests.
        temperature: the model's temperature; a drafter that draws at random draws at the same temperature.
        seed: the request's seed; drafts drawn at random depend on nothing else.
    """

    private: bool = False
    temperature: float = 0.0
    seed: int = 0


PLAIN = RequestInfo()


class Drafter(Protocol):
    """A source of guesses for the model's next tokens."""

    @property
    def name(self) -> str:
        """Return the drafter's name in reports."""

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """Start a request."""

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Propose at most `limit` tokens to follow `context`, which is the prompt and all emitted tokens."""

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """Record the tokens that the last pass emitted; the first `accepted` of these tokens were drafted."""

    def finish(self) -> None:
        """End the request."""


class NoDrafter:
    """A drafter without proposals."""

    name = "none"

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """See `Drafter`."""

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`."""
        return EMPTY

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """See `Drafter`."""

    def finish(self) -> None:
        """See `Drafter`."""
