"""What every drafter offers: a guess at the next tokens, and how sure it is of each.

The caller says what happened: `reset` at the start of a request, `propose` before a pass, `observe` after it,
`finish` at the end. A drafter only ever affects speed, never which tokens come out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Draft:
    """Proposed tokens.

    Attributes:
        confidence: per token, the drafter's estimate that it is right given that those before it are; may
            be empty, and is where the tokens were drawn: whether a draw is verified must not depend on
            it, or what was drawn would change what comes out.
        distributions: float [k, V], what each token was drawn from; None where the tokens were not drawn
            but chosen.
    """

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    distributions: NDArray[np.float64] | None = None


EMPTY = Draft()


@dataclass(frozen=True)
class RequestInfo:
    """What a drafter may want to know of a request.

    Attributes:
        private: nothing of the request may be kept, and nothing kept from others used.
        temperature: the model's; a drafter that draws its drafts at random does so at the same one.
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
        """The last pass emitted these tokens, the first `accepted` of them drafted."""

    def finish(self) -> None:
        """Ends the request."""
