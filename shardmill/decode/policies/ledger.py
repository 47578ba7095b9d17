"""Limits the time that drafting may lose: an account in units of one-token passes.

Every pass for which the drafter was asked is booked with its gain or loss against plain decoding. Drafting pauses while
the account does not cover another failure. A request begins with an amount in proportion to its length, and every pass
adds a little, so drafting is tried again later. However bad the drafter, a request loses less than three per cent. A
gain may be lost again, up to a bound.
"""

_LONG = 200  # tokens; longer requests get no larger initial amount
# A request begins with the balance of the previous one, but with at least _LEAST and at most _MOST of its length.
_LEAST, _MOST = 0.01, 0.018
_GRANT = 0.007  # per pass
_BOUND = 8.0


class Ledger:
    """The account of drafting's gains and losses."""

    def __init__(self) -> None:
        self._balance = 0.0

    def begin(self, tokens: int) -> None:
        """Begin a request of at most `tokens` tokens; it may differ in kind from earlier ones."""
        length = min(tokens, _LONG)
        self._balance = max(_LEAST * length, min(_MOST * length, self._balance))

    def covers(self, price: float) -> bool:
        """Return whether drafting may be tried if a failure costs `price`."""
        return self._balance > price

    def book(self, gain: float) -> None:
        """Book a pass: the time gained, in plain passes; negative for a loss, 0 if nothing was tried."""
        self._balance = min(_BOUND, self._balance + gain + _GRANT)
