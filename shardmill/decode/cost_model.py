"""The default policy: verify as many drafts as maximise expected tokens per second.

The cost of each width is measured, at warm-up and with every pass; the chance of each draft follows from
the drafter's confidence, corrected by what such confidence was worth so far. With k drafts a pass gives 1
+ sum of the chances that the first 1, 2, .. k are all right, and takes the time of the narrowest width
that holds k + 1 tokens. The idea is that of vLLM's adaptive verification: measure steps, maximise
accepted tokens per second.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from shardmill.decode.calibrate import UNSTATED, Calibration
from shardmill.decode.drafters.base import Draft
from shardmill.decode.engine import Engine
from shardmill.decode.policy import FLOOR, PassReport, Pause

_RECENT = 32  # passes per width that its cost is the median of


def measure_widths(engine: Engine, *, repeats: int = 4) -> dict[int, float]:
    """Seconds of a call by width: the least of `repeats`, after one that is not counted. Resets the engine.

    The widths take turns, so that a busy spell of the machine does not fall on one of them alone, and the least is
    taken, as other work on the machine only ever adds time.
    """
    costs = dict.fromkeys(engine.widths, float("inf"))
    for turn in range(repeats + 1):
        for width in engine.widths:
            engine.reset()
            start = time.perf_counter()
            engine.forward([0] * width, range(width), range(width))
            if turn > 0:
                costs[width] = min(costs[width], time.perf_counter() - start)
    engine.reset()
    return costs


class CostModel:
    """Chooses the draft length with the best expected tokens per second.

    Args:
        widths: the engine's.
        costs: seconds by width, as `measure_widths` gives them; without, all widths cost the same until seen.
        floor: acceptance rate under which drafting pauses where it loses time.
    """

    name = "cost_model"

    def __init__(
        self, widths: Sequence[int], *, costs: Mapping[int, float] | None = None, floor: float = FLOOR
    ) -> None:
        self._widths = sorted(widths)
        self._seconds = {w: deque([costs[w]] if costs else [], maxlen=_RECENT) for w in self._widths}
        self._drafter_seconds: deque[float] = deque(maxlen=_RECENT)
        self._floor = floor
        self._calibration = Calibration()
        self._pause = Pause()

    def limit(self, most: int) -> int:
        """See `DraftPolicy`."""
        return 0 if self._pause.active else most

    def length(self, draft: Draft) -> int:
        """See `DraftPolicy`."""
        best, rate = 0, 1 / self._cost(1)
        stated = draft.confidence or (UNSTATED,) * len(draft.tokens)
        for k, accepted in enumerate(self._calibration.expected(stated), start=1):
            gain = (1 + accepted) / self._cost(k + 1)
            if gain > rate:
                best, rate = k, gain
        return best

    def observe(self, report: PassReport) -> None:
        """See `DraftPolicy`."""
        self._seconds[report.width].append(report.seconds)
        self._calibration.observe(report.confidence, report.right)
        if report.drafted == 0:
            self._pause.tick()
            return
        self._drafter_seconds.append(report.drafter_seconds)
        spent = (self._cost(report.width) + median(self._drafter_seconds)) / self._cost(1)
        self._pause.judge(report.drafted, report.accepted, 1 + report.accepted - spent, self._floor)

    def _cost(self, tokens: int) -> float:
        width = next((w for w in self._widths if w >= tokens), self._widths[-1])
        if self._seconds[width]:
            return median(self._seconds[width])
        known = [median(s) for s in self._seconds.values() if s]
        return max(known, default=1.0)
