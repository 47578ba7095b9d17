"""Who owns the inputs of a pass a second after it, and whether they changed while it ran. MAC_OWNERS=1 looks.

Core ML keeps a pass's inputs for about a second and then lets go of them on its reset queue
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
OFTEN = 100  # passes
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
    """What is still bound, in order, and what was found of all that was released.

    Attributes:
        alone: references to an array that nobody else owns, as references() counts them; 0 before the first pass.
    """

    bound: deque[Bound] = field(default_factory=deque)
    alone: int = 0
    passes: int = 0
    inputs: int = 0
    unsafe: int = 0
    changes: threading.Condition = field(default_factory=threading.Condition)


_queue = Queue()


def keep(path: str, given: dict[str, Any]) -> None:
    """Bind the inputs of a pass that has ended, for a second."""
    if not LOOKS or not given:
        return
    with _queue.changes:
        if not _queue.alone:
            _queue.alone = references([next(iter(given.values())).copy()])
            threading.Thread(target=_reset, name="com.apple.coreml.resetQueue", daemon=True).start()
            atexit.register(_wait)
        _queue.bound.append(Bound(path, list(given), list(given.values())))
        _queue.changes.notify_all()


def references(arrays: list[Any]) -> int:
    """Take the last array of a list, and counts its references while this function has it."""
    array = arrays.pop()
    return sys.getrefcount(array)


def _reset() -> None:
    """Release what has been bound for a second, for ever."""
    while True:
        with _queue.changes:
            _queue.changes.wait_for(lambda: bool(_queue.bound))
            first = _queue.bound[0]
        time.sleep(max(0.0, first.until - time.monotonic()))
        with _queue.changes:
            sole = [name for name in reversed(first.names) if references(first.arrays) <= _queue.alone]
            _queue.passes += 1
            _queue.inputs += len(first.names)
            _queue.unsafe += len(sole)
            if sole:
                log.write("unsafe_release", path=first.path, inputs=sorted(sole))
            _queue.bound.popleft()
            if not _queue.bound or _queue.passes % OFTEN == 0:  # the process may be killed, so the last line counts
                log.write("owners", passes=_queue.passes, inputs=_queue.inputs, unsafe=_queue.unsafe)
            _queue.changes.notify_all()


def _wait() -> None:
    """Wait until nothing is bound, before the process ends."""
    with _queue.changes:
        _queue.changes.wait_for(lambda: not _queue.bound)


def copies(given: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs as a pass computes with them: copies, which nobody else can change."""
    return {name: array.copy() for name, array in given.items()}


def compare(path: str, given: dict[str, Any], copied: dict[str, Any]) -> None:
    """Log inputs that were overwritten while the pass ran."""
    if not LOOKS:
        return
    changed = [name for name, array in given.items() if array.tobytes() != copied[name].tobytes()]
    if changed:
        log.write("overwritten", path=path, inputs=changed)
