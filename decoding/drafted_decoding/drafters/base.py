"""The interface of drafters: proposed next tokens, each with a confidence.

The caller reports events: `reset` at the start of a request, `propose` before a pass, `observe` after it, `finish` at
the end. A drafter only affects speed, never which tokens come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """A source of guesses for the model's next tokens.

    Tokens beyond the vocabulary, see `Engine.beyond`, are left out of what it is told, unless it has an attribute
    `beyond` that is True.
    """

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
