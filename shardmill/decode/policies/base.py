"""What every draft policy offers: how much to draft, pass by pass; and when drafting is not worth a try at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardmill.decode.drafters.base import Draft

SHORT_OUTPUT = 10  # tokens below which drafting cannot earn back its set-up
HOT = 1.2  # temperature above which too few drafts are accepted


@dataclass(frozen=True)
class PassReport:
    """What a pass cost and gave.

    Attributes:
        width: tokens of the engine call, padding included.
        drafted: drafts that were verified.
        accepted: drafts that were right.
        confidence: the drafter's, for those proposed tokens that the emitted ones confirm or refute, verified or not.
        right: how many of these proposed tokens, counted from the first, were emitted.
        seconds: time of the engine call.
        drafter_seconds: time for proposing and observing.
        guard_seconds: time for running doubtful rows again.
        asked: whether the drafter was asked for a proposal.
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
    """Decides, before and after the drafter is asked, how many tokens to verify. It affects nothing but speed."""

    @property
    def name(self) -> str:
        """Name in reports."""

    def start(self, tokens: int) -> None:
        """A request of at most `tokens` new tokens begins."""

    def timed(self, width: int, seconds: float) -> None:
        """An engine call of `width` tokens outside decoding, in the prefill, took `seconds`."""

    def limit(self, most: int) -> int:
        """How many drafts to ask for, at most `most`; 0: do not draft."""

    def length(self, draft: Draft) -> int:
        """How many tokens of `draft` to verify."""

    def observe(self, report: PassReport) -> None:
        """A pass is over."""


def worth_drafting(max_new_tokens: int, temperature: float) -> bool:
    """Whether a request is long and predictable enough for drafts."""
    return max_new_tokens >= SHORT_OUTPUT and temperature <= HOT
