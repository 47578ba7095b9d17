"""How often drafts of a stated confidence turn out right: a running, forgetting average per confidence
bin.
"""

from collections.abc import Sequence

_BINS = 12
_PRIOR = 2.0  # trials that the stated confidence itself is worth
UNSTATED = 0.5  # confidence of a draft that states none
_MEMORY = 400.0  # trials of a bin after which older ones fade


class Calibration:
    """Stated confidence -> observed rate of acceptance. Nothing observed: as stated."""

    def __init__(self) -> None:
        self._right = [0.0] * _BINS
        self._tried = [0.0] * _BINS

    def rate(self, confidence: float) -> float:
        """Expected rate of acceptance of a token, given that those before it were accepted."""
        i = _bin(confidence)
        return (self._right[i] + _PRIOR * confidence) / (self._tried[i] + _PRIOR)

    def expected(self, confidence: Sequence[float]) -> list[float]:
        """Per draft length 1, 2, ...: the expected number of accepted tokens."""
        total, alive, lengths = 0.0, 1.0, []
        for stated in confidence:
            alive *= self.rate(stated)
            total += alive
            lengths.append(total)
        return lengths

    def observe(self, confidence: Sequence[float], accepted: int) -> None:
        """Of a draft with these confidences the first `accepted` tokens were right."""
        for i, stated in enumerate(confidence[: accepted + 1]):  # what follows a wrong one was not tried
            b = _bin(stated)
            if self._tried[b] >= _MEMORY:
                self._right[b] *= 0.5
                self._tried[b] *= 0.5
            self._tried[b] += 1
            self._right[b] += i < accepted


def _bin(confidence: float) -> int:
    return min(_BINS - 1, max(0, int(confidence * _BINS)))
