"""What holds of programs while they are loaded: who is told of it, and what Core ML is told.

A first load on a Mac takes minutes, so whoever wants to know which program is being loaded is told. Core ML takes a
hint on how often the shape of a pass will change, where a program takes several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
_reshape: ContextVar[str] = ContextVar("reshape", default="")


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


@contextmanager
def reshaping(frequency: str) -> Iterator[None]:
    """Tell Core ML of programs loaded inside, in this thread, how often shapes change; nothing where it is ""."""
    token = _reshape.set(frequency)
    try:
        yield
    finally:
        _reshape.reset(token)


def hints() -> dict[str, Any]:
    """Return what a model of coremltools is loaded with besides, if Core ML is told how often shapes change."""
    import coremltools as ct

    if not _reshape.get():
        return {}
    return {"optimization_hints": {"reshapeFrequency": ct.ReshapeFrequency[_reshape.get().capitalize()]}}
