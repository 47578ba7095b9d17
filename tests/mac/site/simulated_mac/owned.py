"""Who owns the inputs of a pass a second after it, and whether they changed while it ran. MAC_OWNERS=1 looks.

Core ML keeps a pass's inputs for about a second and then lets go of them on a queue of its own
(MLE5ExecutionStream's resetAfterLingering). CoreMLPythonArray.mm:53-66 holds the numpy array meanwhile. If nobody else
does, its last reference is dropped by a thread without Python's lock, which corrupts memory (coremltools pull requests
2827 and 2829). So a program must own its inputs for longer than Core ML does.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from simulated_mac import log

LINGERS = 1.0  # seconds
LOOKS = os.environ.get("MAC_OWNERS") == "1"


@dataclass
class Bound:
    """The inputs of one pass, as long as Core ML has them."""

    path: str
    names: list[str]
    arrays: list[Any]
    until: float = field(default_factory=lambda: time.monotonic() + LINGERS)


@dataclass
class Queue:
    """What is still bound, in order, and what was found so far."""

    bound: deque[Bound] = field(default_factory=deque)
    passes: int = 0
    inputs: int = 0
    unsafe: int = 0
    changed: int = 0
    wakes: threading.Condition = field(default_factory=threading.Condition)


_queue = Queue()
_alone = 0  # references to an array that nobody but a Bound owns, as release() counts them


def release(bound: Bound) -> list[str]:
    """Lets go of a pass's inputs; names those that had no other owner."""
    found = []
    while bound.arrays:
        array = bound.arrays.pop()
        name = bound.names.pop()
        if sys.getrefcount(array) <= _alone:
            found.append(name)
    return found


def _count_alone() -> int:
    """References that sys.getrefcount sees in release() of an array with no other owner."""
    import numpy as np

    arrays = [np.zeros(1)]
    array = arrays.pop()
    return sys.getrefcount(array)


def keep(path: str, given: dict[str, Any]) -> None:
    """Binds the inputs of a pass that has ended, for a second."""
    if not LOOKS:
        return
    global _alone
    with _queue.wakes:
        if not _alone:
            _alone = _count_alone()
            threading.Thread(target=_reset, name="com.apple.coreml.resetQueue", daemon=True).start()
            atexit.register(_sum_up)
        _queue.passes += 1
        _queue.inputs += len(given)
        _queue.bound.append(Bound(path, list(given), list(given.values())))
        _queue.wakes.notify()


def _reset() -> None:
    """Releases what has been bound for a second."""
    while True:
        with _queue.wakes:
            while not _queue.bound:
                _queue.wakes.wait()
            first = _queue.bound[0]
        time.sleep(max(0.0, first.until - time.monotonic()))
        with _queue.wakes:
            _queue.bound.popleft()
        path = first.path
        sole = release(first)
        if sole:
            _queue.unsafe += len(sole)
            log.write("unsafe_release", path=path, inputs=sorted(sole))


def copies(given: dict[str, Any]) -> dict[str, Any]:
    """The inputs as a pass computes with them: copies, which nobody else can change."""
    return {name: array.copy() for name, array in given.items()}


def compare(path: str, given: dict[str, Any], copied: dict[str, Any]) -> None:
    """Logs inputs that were overwritten while the pass ran."""
    if not LOOKS:
        return
    changed = [name for name, array in given.items() if array.tobytes() != copied[name].tobytes()]
    if changed:
        _queue.changed += len(changed)
        log.write("overwritten", path=path, inputs=changed)


def _sum_up() -> None:
    log.write("owners", passes=_queue.passes, inputs=_queue.inputs, unsafe=_queue.unsafe, overwritten=_queue.changed)
