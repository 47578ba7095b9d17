"""Context for loading programs: a listener for progress, and a hint for Core ML.

A first load on a Mac takes minutes, so a listener can learn which program is being loaded. Core ML accepts a hint on
how often the shape of a pass changes, for programs that accept several shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
_reshape: ContextVar[str] = ContextVar("reshape", default="")


@contextmanager
def on_program_load(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener` with the name of every program whose load begins in this context and thread."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_load(name: str) -> None:
    """Report that the load of a program begins."""
    listener = _listener.get()
    if listener is not None:
        listener(name)


@contextmanager
def reshaping(frequency: str) -> Iterator[None]:
    """Tell Core ML how often shapes change for programs loaded in this context and thread; nothing if ""."""
    token = _reshape.set(frequency)
    try:
        yield
    finally:
        _reshape.reset(token)


def hints() -> dict[str, Any]:
    """Return extra arguments for loading a coremltools model; empty unless `reshaping` is active."""
    import coremltools as ct

    if not _reshape.get():
        return {}
    return {"optimization_hints": {"reshapeFrequency": ct.ReshapeFrequency[_reshape.get().capitalize()]}}
