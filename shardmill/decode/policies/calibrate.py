"""Calibration of a drafter's confidence: how often drafts of a stated confidence turn out right.

It combines a fading average per confidence bin with a factor for how much easier or harder the current request is.
"""

from collections.abc import Sequence

UNSTATED = 0.5  # confidence of a draft that states none
_BINS = 12
_PRIOR = 2.0  # number of trials that the stated confidence itself counts for
_MEMORY = 400.0  # trials of a bin after which older ones fade
_USUAL = 8.0  # weight, in right tokens, of the assumption that a request is as easy as earlier ones
_EASIEST = 1.25  # upper bound of a request's ease: rates near 1 leave no room for more


class Calibration:
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
