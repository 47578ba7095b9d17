"""How much time drafting may lose: an account in passes of one token.

Every pass of which the drafter was asked is booked with what it gained over plain decoding, or lost. Drafting rests
while the account does not hold the price of another failure. A request begins with an account in proportion to its
length, and a little is granted with every pass, so drafting is tried again later. Whatever the drafter is worth, a
request thus loses a few per cent at most; what it gained itself it may lose again, up to a bound.
"""

_LONG = 200  # tokens from which on a request gets no more
_LEAST, _MOST = 0.015, 0.03  # of a request's length: what it begins with, the rest of the one before in between
_GRANT = 0.01  # per pass
_BOUND = 8.0


class Ledger:
    """The account."""

    def __init__(self) -> None:
        self._balance = 0.0

    def begin(self, tokens: int) -> None:
        """A request of at most that many tokens begins; it may be of another kind than those before it."""
        length = min(tokens, _LONG)
        self._balance = max(_LEAST * length, min(_MOST * length, self._balance))

    def covers(self, price: float) -> bool:
        """Whether drafting may be tried, where a failure costs `price`."""
        return self._balance > price

    def book(self, gain: float) -> None:
        """A pass is over; it gained that many plain passes' time, or lost it. 0 where nothing was tried."""
        self._balance = min(_BOUND, self._balance + gain + _GRANT)
