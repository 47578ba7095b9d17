"""How often drafts of a stated confidence turn out right: a fading average per confidence bin, and how much easier or
harder than usual the current request is.
"""

from collections.abc import Sequence

UNSTATED = 0.5  # confidence of a draft that states none
_BINS = 12
_PRIOR = 2.0  # trials that the stated confidence itself is worth
_MEMORY = 400.0  # trials of a bin after which older ones fade
_USUAL = 8.0  # right tokens that "as easy as the requests before it" is worth
_EASIEST = 1.25  # a request's luck is believed up to here: rates near 1 leave no room for more


class Calibration:
    """Maps stated confidence to the observed rate of acceptance; unobserved, to itself within the width of a bin."""

    def __init__(self) -> None:
        self._right = [0.0] * (_BINS + 1)  # the last bin is certainty
        self._tried = [0.0] * (_BINS + 1)
        self._rates = [min(1.0, (i + 0.5) / _BINS) for i in range(_BINS + 1)]
        self.start()

    def start(self) -> None:
        """Begins a request, of which it is not yet known how easy it is."""
        self._hoped = self._got = 0.0  # right tokens that the rates promised, and those that came
        self._ease = 1.0

    def rate(self, confidence: float) -> float:
        """Expected rate of acceptance of a token, given that those before it were accepted."""
        return min(1.0, self._rates[int(confidence * _BINS)] * self._ease)

    def expected(self, confidence: Sequence[float]) -> list[float]:
        """Per draft length 1, 2, ...: the expected number of accepted tokens."""
        total, alive, lengths = 0.0, 1.0, []
        for stated in confidence:
            alive *= self.rate(stated)
            total += alive
            lengths.append(total)
        return lengths

    def observe(self, confidence: Sequence[float], accepted: int) -> None:
        """Learns that of a draft with these confidences the first `accepted` tokens were right."""
        for i, stated in enumerate(confidence[: accepted + 1]):  # what follows a wrong one was not tried
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
