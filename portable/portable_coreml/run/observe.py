"""Lets a caller see every result while a program runs: `with trace(observer): model.predict(...)`.

The observer gets (output name, operation type, tensor as held). It applies to predictions made by the thread that
opened the context. Observed predictions are interpreted, so they are slower, but give the same values.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Observer = Callable[[str, str, Tensor], None]
_CURRENT: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("observer", default=None)
FP16_MAX = 65504.0


def current() -> Observer | None:
    """The observer of this context, if any."""
    return _CURRENT.get()


@contextmanager
def trace(observer: Observer) -> Iterator[None]:
    """Shows every operation's results to `observer` while the context is open."""
    token = _CURRENT.set(observer)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@dataclass(frozen=True)
class NonFinite:
    """The first result that is not finite: output name, operation type, and whether it is an overflow or NaN."""

    name: str
    kind: str
    what: str


class FirstNonFinite:
    """An observer that remembers the first operation whose floating-point result overflows or turns NaN."""

    def __init__(self) -> None:
        self.found: NonFinite | None = None

    def __call__(self, name: str, kind: str, value: Tensor) -> None:
        if self.found is not None or not value.is_floating_point() or bool(torch.isfinite(value).all()):
            return
        self.found = NonFinite(name, kind, "NaN" if bool(torch.isnan(value).any()) else "overflow")
