"""Estimates the cost of a pass of each width, in one-token passes.

A machine has slow spells, and they do not affect all widths alike. So a width is compared with width 1 only if passes
of both followed each other, and the median of such pairs counts. An estimate that has not been confirmed for long fades
towards 1, until the width is worth a try, which measures it again.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

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
