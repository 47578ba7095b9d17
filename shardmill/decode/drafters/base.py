"""What every drafter offers: a guess at the next tokens, and how sure it is of each.

The caller says what happened: `reset` at the start of a request, `propose` before a pass, `observe` after it,
`finish` at the end. A drafter only ever affects speed, never which tokens come out.
"""

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
        confidence: per token, the drafter's estimate that it is right given that those before it are. May be empty, and
            must be where the tokens were drawn at random: if a draw's verification depended on its confidence, the
            draw would change what comes out.
        distributions: float [k, V], what each token was drawn from; None if the tokens were chosen, not drawn.
    """

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    distributions: NDArray[np.float64] | None = None


EMPTY = Draft()


def usable(draft: Draft, limit: int, vocab: int) -> Draft:
    """The part of `draft` that an engine can be asked to verify, so that no drafter can break decoding.

    It ends at `limit`, or before the first token outside the vocabulary. Confidences that do not fit the tokens are
    dropped. Without fitting distributions a draw cannot be verified, so nothing of it is left.
    """
    tokens = draft.tokens[:limit]
    length = next((i for i, token in enumerate(tokens) if not 0 <= token < vocab), len(tokens))
    if draft.distributions is not None and draft.distributions.shape != (len(draft.tokens), vocab):
        return EMPTY
    sure = draft.confidence
    if sure and (len(sure) != len(draft.tokens) or not all(0 <= c <= 1 for c in sure)):
        draft = replace(draft, confidence=())
    return cut(draft, length)


def cut(draft: Draft, length: int) -> Draft:
    """The first `length` tokens of `draft`, with what belongs to them."""
    if length >= len(draft.tokens):
        return draft
    distributions = None if draft.distributions is None else draft.distributions[:length]
    return replace(
        draft, tokens=draft.tokens[:length], confidence=draft.confidence[:length], distributions=distributions
    )


@dataclass(frozen=True)
class RequestInfo:
    """What a drafter may want to know about a request.

    Attributes:
        private: nothing of the request may be kept, and nothing kept from other requests may be used.
        temperature: the model's; a drafter that draws at random draws at the same temperature.
        seed: the request's; drafts drawn at random depend on nothing else.
    """

    private: bool = False
    temperature: float = 0.0
    seed: int = 0


PLAIN = RequestInfo()


class Drafter(Protocol):
    """Guesses what the model will say next."""

    @property
    def name(self) -> str:
        """Name in reports."""

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """Starts a request."""

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """At most `limit` tokens to follow `context`, which is the prompt and all emitted tokens."""

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """Learns what the last pass emitted; the first `accepted` of these tokens were drafted."""

    def finish(self) -> None:
        """Ends the request."""
