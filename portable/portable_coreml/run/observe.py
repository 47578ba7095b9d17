"""Lets a caller see every result while a program runs: `with trace(observer): model.predict(...)`.

The observer gets (output name, operation type, tensor as held). It applies to predictions made by the thread that
opened the context. Observed predictions are interpreted, so they are slower, but give the same values: in fp16 mode
to the last bit, in fp32 mode up to the order of sums.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Observer = Callable[[str, str, "Tensor"], None]
_CURRENT: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("observer", default=None)


def current() -> Observer | None:
    """Return the observer of this context, if any."""
    return _CURRENT.get()


@contextmanager
def trace(observer: Observer) -> Iterator[None]:
    """Show every operation's results to `observer` while the context is open."""
    token = _CURRENT.set(observer)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@dataclass(frozen=True)
class NonFinite:
    """The first result that is not finite.

    Attributes:
        name: the output's name in the program.
        kind: the operation's type, "matmul" for example.
        what: "overflow" if it holds infinities only, "NaN" otherwise.
    """

    name: str
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.what} in {self.kind} '{self.name}'"


class FirstNonFinite:
    """An observer that remembers the first operation whose floating-point result is not finite.

    If a prediction came out as NaN, run it once more under observation.

        first = FirstNonFinite()
        with trace(first):
            model.predict(inputs, state)
        print(first.found)  # overflow in matmul 'scores'; None if every result is finite.

    A prediction changes its state, so pass a state from before the failed prediction. Save it with `read_state` and
    restore it with `write_state`. With the state that the failed prediction left, the operation found is the
    `read_state` of a cache that holds NaN already. Inputs are not results: an infinite input shows at the first
    operation that takes it, and so does a mask of -inf. In fp16 mode a device would have the same overflow; in fp32
    mode every result may be finite.

    Attributes:
        found: the operation, or None.
    """

    def __init__(self) -> None:
        self.found: NonFinite | None = None

    def __call__(self, name: str, kind: str, value: Tensor) -> None:
        """Look at one result."""
        if self.found is not None or not value.is_floating_point() or bool(value.isfinite().all()):
            return
        self.found = NonFinite(name, kind, "NaN" if bool(value.isnan().any()) else "overflow")
