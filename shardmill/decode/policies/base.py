"""The interface of draft policies: how much to draft in each pass, and when drafting is not worth a try at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardmill.decode.drafters.base import Draft

SHORT_OUTPUT = 10  # tokens; shorter outputs cannot earn back the set-up of drafting
HOT = 1.2  # temperature above which too few drafts are accepted


@dataclass(frozen=True)
class PassReport:
    """Cost and outcome of a pass.

    Attributes:
        width: tokens of the engine call, padding included.
        drafted: drafts that were verified.
        accepted: drafts that were right.
        confidence: the drafter's confidence in those proposed tokens that the emitted ones confirm or refute, verified
            or not.
        right: how many of these proposed tokens, counted from the first, were emitted.
        seconds: time of the engine call.
        drafter_seconds: time for proposing and observing.
        guard_seconds: time for running doubtful rows again.
        asked: True if the drafter was asked for a proposal.
    """

    width: int
    drafted: int
    accepted: int
    confidence: Sequence[float]
    right: int
    seconds: float
    drafter_seconds: float
    guard_seconds: float = 0.0
    asked: bool = True


class DraftPolicy(Protocol):
    """A decision, before and after each proposal, on how many tokens to verify. It affects nothing but speed."""

    @property
    def name(self) -> str:
        """Return the policy's name in reports."""

    def start(self, tokens: int) -> None:
        """Begin a request of at most `tokens` new tokens."""

    def timed(self, width: int, seconds: float) -> None:
        """Record that an engine call of `width` tokens outside decoding, in the prefill, took `seconds`."""

    def limit(self, most: int) -> int:
        """Return how many drafts to request, at most `most`; 0 means no drafting."""

    def length(self, draft: Draft) -> int:
        """Return how many tokens of `draft` to verify."""

    def observe(self, report: PassReport) -> None:
        """Record the outcome of a pass."""


def worth_drafting(max_new_tokens: int, temperature: float) -> bool:
    """Return whether a request is long and predictable enough for drafts."""
    return max_new_tokens >= SHORT_OUTPUT and temperature <= HOT
