"""A policy that knows no costs: draft more when most drafts were right lately, less when few were, none
at a loss.

The scheme of mobile practice: start with 6, 3 under 50 % acceptance, 8 over 80 %, none under 40 %; capped
by what a pass can hold, so with passes of 4 tokens it only ever chooses between 3 drafts and none.
"""

from collections import deque

from shardmill.decode.drafters.base import Draft
from shardmill.decode.policies.base import FLOOR, PassReport, Pause

_FEW, _START, _MANY = 3, 6, 8
_LOW, _HIGH = 0.5, 0.8


class AdaptiveK:
    """Draft length by the acceptance rate of the last `window` passes that drafted."""

    name = "adaptive_k"

    def __init__(self, *, floor: float = FLOOR, window: int = 16) -> None:
        self._floor = floor
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)
        self._length = _START
        self._pause = Pause()

    def start(self, tokens: int) -> None:
        """See `DraftPolicy`."""

    def timed(self, width: int, seconds: float) -> None:
        """See `DraftPolicy`."""

    def limit(self, most: int) -> int:
        """See `DraftPolicy`."""
        return 0 if self._pause.active else min(most, self._length)

    def length(self, draft: Draft) -> int:
        """See `DraftPolicy`."""
        return len(draft.tokens)

    def observe(self, report: PassReport) -> None:
        """See `DraftPolicy`."""
        if report.drafted == 0:
            self._pause.tick()
            return
        self._recent.append((report.drafted, report.accepted))
        rate = sum(a for _, a in self._recent) / sum(d for d, _ in self._recent)
        self._length = _FEW if rate < _LOW else _MANY if rate > _HIGH else _START
        self._pause.judge(report.drafted, report.accepted, -1.0, self._floor)
