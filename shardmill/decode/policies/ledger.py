"""Limits the time that drafting may lose: an account in passes of one token.

Every pass for which the drafter was asked is booked with what it gained or lost against plain decoding. Drafting rests
while the account does not cover another failure. A request begins with an amount in proportion to its length, and every
pass adds a little, so drafting is tried again later. However bad the drafter, a request loses less than three per
cent; what it has gained it may lose again, up to a bound.
"""

_LONG = 200  # tokens from which on a request gets no more
# A request begins with what the one before left, but with at least _LEAST and at most _MOST of its own length.
_LEAST, _MOST = 0.01, 0.018
_GRANT = 0.007  # per pass
_BOUND = 8.0


class Ledger:
    """The account."""

    def __init__(self) -> None:
        self._balance = 0.0

    def begin(self, tokens: int) -> None:
        """Begins a request of at most `tokens` tokens; it may be of another kind than those before it."""
        length = min(tokens, _LONG)
        self._balance = max(_LEAST * length, min(_MOST * length, self._balance))

    def covers(self, price: float) -> bool:
        """Whether drafting may be tried if a failure costs `price`."""
        return self._balance > price

    def book(self, gain: float) -> None:
        """Books a pass: the time that it gained, in plain passes; negative if it lost, 0 if nothing was tried."""
        self._balance = min(_BOUND, self._balance + gain + _GRANT)
