"""The default policy: verify the number of drafts that maximises expected tokens per second.

The cost of each width is measured, at warm-up and with every pass. The probability of each draft follows from the
drafter's confidence, corrected by the observed acceptance of such confidence in this request and before. With k drafts
a pass gives 1 + sum of the probabilities that the first 1, 2, .. k are all right, and takes the time of the narrowest
width that fits k + 1 tokens. The idea comes from vLLM's adaptive verification: measure steps, maximise accepted tokens
per second. A ledger of the time that drafting gained and lost, including the drafter's time, bounds the loss if the
estimates are wrong.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from shardmill.decode.drafters.base import Draft
from shardmill.decode.engine import Engine, decode_widths
from shardmill.decode.policies.base import PassReport
from shardmill.decode.policies.calibrate import UNSTATED, Calibration
from shardmill.decode.policies.ledger import Ledger
from shardmill.decode.policies.width_costs import WidthCosts

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
        self._calibration = Calibration()
        self._ledger = Ledger()
        self._floor = floor
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)  # drafted, accepted
        self._guard: deque[float] = deque([0.0], maxlen=_RECENT)  # seconds of re-verification per drafting pass
        self._drafter: deque[float] = deque(maxlen=_RECENT)
        self._asked = False  # in the current request

    def start(self, tokens: int) -> None:
        """See `DraftPolicy`."""
        self._calibration.start()
        self._ledger.begin(tokens)
        self._asked = False

    def timed(self, width: int, seconds: float) -> None:
        """See `DraftPolicy`."""
        self._costs.add(width, seconds)

    def limit(self, most: int) -> int:
        """See `DraftPolicy`."""
        asking = self._costs.in_passes(median(self._drafter)) if self._drafter else 0.0
        return most if self._ledger.covers(asking) and not self._costs.needs_single else 0

    def length(self, draft: Draft) -> int:
        """See `DraftPolicy`."""
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
        """See `DraftPolicy`."""
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
