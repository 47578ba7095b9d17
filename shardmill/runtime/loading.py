"""Who wants to know which program is being loaded is told: a first load on a Mac takes minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextmanager
def told(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside, in this thread, `listener` gets the name of every program whose load begins."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def begins(name: str) -> None:
    """The load of a program begins."""
    listener = _listener.get()
    if listener is not None:
        listener(name)
