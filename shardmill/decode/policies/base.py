"""What every draft policy offers: how much to draft, pass by pass; and when drafting is not worth a try at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardmill.decode.drafters.base import Draft

SHORT_OUTPUT = 10  # tokens below which drafting cannot earn back its set-up
HOT = 1.2  # temperature above which too few drafts are accepted
FLOOR = 0.4  # acceptance rate below which drafting may be a loss


@dataclass(frozen=True)
class PassReport:
    """What a pass cost and gave.

    Attributes:
        width: tokens of the engine call, padding included. asked: the drafter was asked for a proposal.
        drafted, accepted: how many drafts were verified, how many were right.
        confidence: the drafter's, for the proposed tokens that the emitted ones tell about, verified or not.
        right: how many of those proposed tokens, from the first on, were emitted.
        seconds, guard_seconds, drafter_seconds: the engine call; running doubtful rows again; proposing and observing.
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
    """Decides, before and after the drafter is asked, how many tokens to verify. Affects speed alone."""

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


class Pause:
    """Stops drafting while it loses, and tries again later; after each vain try it waits twice as long.

    Args:
        first, longest: passes without drafts after the first and after many losses.
        probe: drafting passes by which a try is judged.
    """

    def __init__(self, *, first: int = 8, longest: int = 64, probe: int = 4) -> None:
        self._first, self._longest, self._probe = first, longest, probe
        self._wait = first
        self._left = 0
        self._tried: list[tuple[int, int, float]] = []  # drafted, accepted, passes' worth of time gained

    @property
    def active(self) -> bool:
        """Whether drafting rests."""
        return self._left > 0

    def tick(self) -> None:
        """A pass without drafts is over."""
        self._left = max(0, self._left - 1)

    def judge(self, drafted: int, accepted: int, gain: float, floor: float) -> None:
        """A pass with drafts is over; it saved `gain` plain passes' time, or lost it.

        Pauses when over the last `probe` such passes the acceptance rate is under `floor` and they lost time.
        """
        self._tried.append((drafted, accepted, gain))
        if len(self._tried) < self._probe:
            return
        rate = sum(t[1] for t in self._tried) / sum(t[0] for t in self._tried)
        lost = sum(t[2] for t in self._tried) < 0
        self._tried = []
        if rate < floor and lost:
            self._left = self._wait
            self._wait = min(self._longest, self._wait * 2)
        else:
            self._wait = self._first
