"""How often drafts of a stated confidence turn out right: a running, forgetting average per confidence bin."""

from collections.abc import Sequence

UNSTATED = 0.5  # confidence of a draft that states none
_BINS = 12
_PRIOR = 2.0  # trials that the stated confidence itself is worth
_MEMORY = 400.0  # trials of a bin after which older ones fade


class Calibration:
    """Stated confidence -> observed rate of acceptance. Nothing observed: as stated, to the width of a bin."""

    def __init__(self) -> None:
        self._right = [0.0] * (_BINS + 1)  # the last bin is certainty
        self._tried = [0.0] * (_BINS + 1)
        self._rates = [min(1.0, (i + 0.5) / _BINS) for i in range(_BINS + 1)]

    def rate(self, confidence: float) -> float:
        """Expected rate of acceptance of a token, given that those before it were accepted."""
        return self._rates[int(confidence * _BINS)]

    def expected(self, confidence: Sequence[float]) -> list[float]:
        """Per draft length 1, 2, ...: the expected number of accepted tokens."""
        total, alive, lengths = 0.0, 1.0, []
        for stated in confidence:
            alive *= self._rates[int(stated * _BINS)]
            total += alive
            lengths.append(total)
        return lengths

    def observe(self, confidence: Sequence[float], accepted: int) -> None:
        """Of a draft with these confidences the first `accepted` tokens were right."""
        for i, stated in enumerate(confidence[: accepted + 1]):  # what follows a wrong one was not tried
            b = int(stated * _BINS)
            if self._tried[b] >= _MEMORY:
                self._right[b] *= 0.5
                self._tried[b] *= 0.5
            self._tried[b] += 1
            self._right[b] += i < accepted
            prior = min(1.0, (b + 0.5) / _BINS)
            self._rates[b] = (self._right[b] + _PRIOR * prior) / (self._tried[b] + _PRIOR)
