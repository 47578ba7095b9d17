"""When to draft, and how many tokens: by what passes cost here and how many drafts were accepted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from drafted_decoding.drafters.base import Draft
from drafted_decoding.engine import DecodeError, Engine, decode_widths

SHORT_OUTPUT = 10  # tokens; shorter outputs cannot earn back the set-up of drafting
HOT = 1.2  # temperature above which too few drafts are accepted


@dataclass(frozen=True)
class PassReport:
    """Cost and outcome of a pass.

    Attributes:
        width: tokens of the engine call, padding included.
        drafted: drafts that were verified.
        accepted: drafts that were right.
        confidence: the drafter's confidence in the proposed tokens that emitted tokens confirm or refute, verified
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


def worth_drafting(max_new_tokens: int, temperature: float) -> bool:
    """Return whether a request is long and predictable enough for drafts."""
    return max_new_tokens >= SHORT_OUTPUT and temperature <= HOT


class AlwaysDraft:
    """A policy that verifies every draft whole. No policy affects anything but speed."""

    name = "always"

    def start(self, tokens: int) -> None:
        """Begin a request of at most `tokens` new tokens."""

    def timed(self, width: int, seconds: float) -> None:
        """Record that an engine call of `width` tokens outside decoding, in the prefill, took `seconds`."""

    def limit(self, most: int) -> int:
        """Return how many drafts to request, at most `most`; 0 means no drafting."""
        return most

    def length(self, draft: Draft) -> int:
        """Return how many tokens of `draft` to verify."""
        return len(draft.tokens)

    def observe(self, report: PassReport) -> None:
        """Record the outcome of a pass."""


_LONG = 200  # tokens; longer requests get no larger initial amount
# A request begins with the balance of the previous one, but with at least _LEAST and at most _MOST of its length.
_LEAST, _MOST = 0.01, 0.018
_GRANT = 0.007  # per pass
_BOUND = 8.0


class DraftBudget:
    """The account of drafting's gains and losses."""

    def __init__(self) -> None:
        self._balance = 0.0

    def begin(self, tokens: int) -> None:
        """Begin a request of at most `tokens` tokens; it may differ in kind from earlier ones."""
        length = min(tokens, _LONG)
        self._balance = max(_LEAST * length, min(_MOST * length, self._balance))

    def covers(self, price: float) -> bool:
        """Return whether drafting may be tried if a failure costs `price`."""
        return self._balance > price

    def book(self, gain: float) -> None:
        """Book a pass: the time gained, in plain passes; negative for a loss, 0 if nothing was tried."""
        self._balance = min(_BOUND, self._balance + gain + _GRANT)


_PAIRS = 32  # the most pairs in a ratio's median
_MEASURED = 8  # number of pairs that a measurement at warm-up counts for
_DOUBT = 16.0  # passes per known pair after which an unseen width's extra cost is halved


class WidthCosts:
    """Running estimates of the cost of each width.

    Args:
        widths: the widths of decode passes.
        measured: seconds by width; without them, the first call of each width counts as a warm-up and is ignored.
    """

    def __init__(self, widths: Sequence[int], measured: Mapping[int, float] | None = None) -> None:
        self._widths = sorted(widths)
        self._pairs: dict[int, deque[float]] = {w: deque(maxlen=_PAIRS) for w in self._widths}
        self._ratios = dict.fromkeys(self._widths, 1.0)
        self._unseen = dict.fromkeys(self._widths, 0)
        self._singles: deque[float] = deque(maxlen=_PAIRS)  # estimated seconds of a one-token pass, from any width
        self._before: tuple[int, float] | None = None
        self._cold = set() if measured else set(self._widths)
        self._single = 0.0  # the median of _singles; 0 if unknown
        measured = measured or {}
        for width, seconds in measured.items():
            self._pairs[width].extend([seconds / measured[1]] * _MEASURED)
            self._settle(width, seconds)

    @property
    def needs_single(self) -> bool:
        """Return whether a one-token pass should come next, because nothing is known yet for a comparison."""
        return 1 in self._cold or (
            self._before is not None and self._before[0] != 1 and not self._pairs[self._before[0]]
        )

    def ratio(self, tokens: int) -> float:
        """Return the cost of a pass of `tokens`, in one-token passes; 1 if unknown."""
        width = next((w for w in self._widths if w >= tokens), self._widths[-1])
        pairs = len(self._pairs[width])
        doubt: float = 0.5 ** (self._unseen[width] / (_DOUBT * pairs)) if pairs else 0.0
        return 1.0 + (self._ratios[width] - 1.0) * doubt

    def in_passes(self, seconds: float) -> float:
        """Convert seconds to one-token passes; 0 if unknown."""
        return seconds / self._single if self._single else 0.0

    def add(self, width: int, seconds: float) -> None:
        """Record that a pass of `width` took `seconds`."""
        if width in self._cold:
            self._cold.remove(width)
            self._before = None
            return
        before, self._before = self._before, (width, seconds)
        if before is not None and width != before[0] and 1 in (width, before[0]):
            (_, narrow), (wide, longer) = sorted((before, (width, seconds)))
            self._pairs[wide].append(longer / narrow)
            self._before = None  # no pass is part of two pairs
        for other in self._widths:
            self._unseen[other] += 1
        self._settle(width, seconds)

    def _settle(self, width: int, seconds: float) -> None:
        self._unseen[width] = 0
        for wide in self._widths[1:]:
            if self._pairs[wide]:
                self._ratios[wide] = max(1.0, median(self._pairs[wide]))
        self._singles.append(seconds / self._ratios[width])
        self._single = median(self._singles)


UNSTATED = 0.5  # confidence of a draft that states none
_BINS = 12
_PRIOR = 2.0  # number of trials that the stated confidence itself counts for
_MEMORY = 400.0  # trials of a bin after which older ones fade
_USUAL = 8.0  # weight, in right tokens, of the assumption that a request is as easy as earlier ones
_EASIEST = 1.25  # upper bound of a request's ease: rates near 1 leave no room for more


class WidthCalibration:
    """A map from stated confidence to the observed acceptance rate, or to itself if nothing is observed."""

    def __init__(self) -> None:
        self._right = [0.0] * (_BINS + 1)  # the last bin is certainty
        self._tried = [0.0] * (_BINS + 1)
        self._rates = [min(1.0, (i + 0.5) / _BINS) for i in range(_BINS + 1)]
        self.start()

    def start(self) -> None:
        """Begin a request, whose ease is unknown."""
        self._hoped = self._got = 0.0  # right tokens that the rates predicted, and actual ones
        self._ease = 1.0

    def rate(self, confidence: float) -> float:
        """Return the expected acceptance rate of a token, given that the tokens before it were accepted."""
        return min(1.0, self._rates[int(confidence * _BINS)] * self._ease)

    def expected(self, confidence: Sequence[float]) -> list[float]:
        """Return the expected number of accepted tokens for each draft length 1, 2, ..."""
        total, alive, lengths = 0.0, 1.0, []
        for stated in confidence:
            alive *= self.rate(stated)
            total += alive
            lengths.append(total)
        return lengths

    def observe(self, confidence: Sequence[float], accepted: int) -> None:
        """Record that the first `accepted` tokens of a draft with these confidences were right."""
        for i, stated in enumerate(confidence[: accepted + 1]):  # tokens after a wrong one were not tried
            b = int(stated * _BINS)
            self._hoped += self._rates[b]
            self._got += i < accepted
            self._count(b, i < accepted)
        self._ease = min(_EASIEST, (self._got + _USUAL) / (self._hoped + _USUAL))

    def _count(self, b: int, right: bool) -> None:
        if self._tried[b] >= _MEMORY:
            self._right[b] *= 0.5
            self._tried[b] *= 0.5
        self._tried[b] += 1
        self._right[b] += right
        prior = min(1.0, (b + 0.5) / _BINS)
        self._rates[b] = (self._right[b] + _PRIOR * prior) / (self._tried[b] + _PRIOR)


FLOOR = 0.4  # acceptance rate below which drafting may be a loss
_RECENT = 32  # passes that the drafter's and the guard's time is averaged over
_CREDIT = 1.0  # plain passes that drafting may lose beyond its account while acceptance is at least the floor


def measure_widths(engine: Engine, *, repeats: int = 4) -> dict[int, float]:
    """Measure the seconds of a decode pass by width: the least of `repeats`, after one uncounted pass.

    The engine is reset. The widths take turns, so that a busy spell of the machine does not hit only one width. The
    least time counts, because other work on the machine only ever adds time. Widths that are for prompts alone take
    part in the first turn, as a first call may be slow.
    """
    costs = dict.fromkeys(decode_widths(engine), float("inf"))
    for turn in range(repeats + 1):
        for width in costs if turn else engine.widths:
            engine.reset()
            start = time.perf_counter()
            engine.forward([0] * width, range(width), range(width))
            if turn > 0:
                costs[width] = min(costs[width], time.perf_counter() - start)
    engine.reset()
    return costs


class CostModel:
    """A policy that chooses the draft length with the best expected tokens per second.

    Args:
        widths: the widths of decode passes.
        costs: seconds by width, from `measure_widths`; without them, the first passes are measured.
        floor: acceptance rate below which drafting is given up sooner if it loses time.
    """

    name = "cost_model"

    def __init__(
        self, widths: Sequence[int], *, costs: Mapping[int, float] | None = None, floor: float = FLOOR
    ) -> None:
        self._costs = WidthCosts(widths, costs)
        self._calibration = WidthCalibration()
        self._ledger = DraftBudget()
        self._floor = floor
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)  # drafted, accepted
        self._guard: deque[float] = deque([0.0], maxlen=_RECENT)  # seconds of re-verification per drafting pass
        self._drafter: deque[float] = deque(maxlen=_RECENT)
        self._asked = False  # in the current request

    def start(self, tokens: int) -> None:
        """See `AlwaysDraft`."""
        self._calibration.start()
        self._ledger.begin(tokens)
        self._asked = False

    def timed(self, width: int, seconds: float) -> None:
        """See `AlwaysDraft`."""
        self._costs.add(width, seconds)

    def limit(self, most: int) -> int:
        """See `AlwaysDraft`."""
        asking = self._costs.in_passes(median(self._drafter)) if self._drafter else 0.0
        return most if self._ledger.covers(asking) and not self._costs.needs_single else 0

    def length(self, draft: Draft) -> int:
        """See `AlwaysDraft`."""
        best, rate = 0, 1.0
        guard = self._costs.in_passes(sum(self._guard) / len(self._guard))
        credit = _CREDIT if self._acceptance() >= self._floor else 0.0
        stated = draft.confidence or (UNSTATED,) * len(draft.tokens)
        for k, accepted in enumerate(self._calibration.expected(stated), start=1):
            cost = self._costs.ratio(k + 1) + guard
            if (1 + accepted) / cost > rate and self._ledger.covers(cost - 1 - credit):
                best, rate = k, (1 + accepted) / cost
        return best

    def observe(self, report: PassReport) -> None:
        """See `AlwaysDraft`."""
        self._costs.add(report.width, report.seconds)
        self._calibration.observe(report.confidence, report.right)
        gain = -self._costs.in_passes(self._drafter_seconds(report)) if report.asked else 0.0
        if report.drafted:
            self._recent.append((report.drafted, report.accepted))
            self._guard.append(report.guard_seconds)
            extra = self._costs.ratio(report.width) - 1 + self._costs.in_passes(report.guard_seconds)
            gain += report.accepted - extra
        self._ledger.book(gain)

    def _drafter_seconds(self, report: PassReport) -> float:
        """Return the time of a proposal; a request's first is left out, as it may include work done once a request."""
        if self._asked:
            self._drafter.append(report.drafter_seconds)
        self._asked = True
        return median(self._drafter) if self._drafter else 0.0

    def _acceptance(self) -> float:
        drafted = sum(d for d, _ in self._recent)
        return sum(a for _, a in self._recent) / drafted if drafted else 0.0


DraftPolicy = AlwaysDraft | CostModel
POLICIES = ("cost_model", "always")


def create_policy(name: str, widths: Sequence[int], *, costs: Mapping[int, float] | None = None) -> DraftPolicy:
    """Create a policy; it may serve many requests of one engine and learns from them.

    Args:
        name: one of `POLICIES`.
        widths: the widths of decode passes.
        costs: seconds by width, from `measure_widths`.

    Raises:
        DecodeError: no policy has that name.
    """
    if name == "cost_model":
        return CostModel(widths, costs=costs)
    if name == "always":
        return AlwaysDraft()
    raise DecodeError(f"no draft policy is called {name!r}: use one of {', '.join(POLICIES)}")
