"""Time that Core ML takes, with Python's lock held: coremltools has no gil_scoped_release in any of its files.

MAC_LOAD_SECONDS, MAC_FIRST_PASS_SECONDS, MAC_PLAN_SECONDS and MAC_COMPILE_SECONDS say how long. MAC_CACHE names a
folder that stands for the system's cache: what any process loaded before, from the same path with the same content, on
the same build of the system, then takes no time. Whether first passes are kept too is not known of a Mac;
MAC_CACHE_KEEPS=all keeps them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from simulated_mac import log

SMALL = 1 << 20  # bytes; of larger files size and time of change stand for the content
LIBRARY = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def hold(seconds: float) -> None:
    """Wait in one call of C. A signal with a handler of Python's waits for the end; one with none ends the process.

    pthread_cond_timedwait goes on after a handler of C has returned, unlike sleep (POSIX).
    """
    end = time.time() + seconds
    until = _Time(int(end), int(end % 1 * 1e9))
    mutex, condition = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)  # zeros initialise both
    LIBRARY.pthread_mutex_lock(mutex)
    while time.time() < end:  # once, but for a wake-up without a cause
        LIBRARY.pthread_cond_timedwait(condition, mutex, ctypes.byref(until))
    LIBRARY.pthread_mutex_unlock(mutex)


def take(what: str, path: str, *details: str) -> float:
    """Take the time of something, unless the system's cache has it.

    Args:
        what: "load", "first_pass", "plan" or "compile".
        path: of the program.
        details: what else decides whether it is the same thing.

    Returns:
        Seconds that were waited.
    """
    seconds = float(os.environ.get(f"MAC_{what.upper()}_SECONDS") or 0)
    kept = _kept(what, path, details)
    if seconds and not (kept and kept.exists()):
        log.write("waiting", what=what, path=path)
        hold(seconds)
    else:
        seconds = 0.0
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
    return seconds


def _kept(what: str, path: str, details: Sequence[str]) -> Path | None:
    """Return the file that says that the system's cache has something; None where nothing is kept."""
    folder = os.environ.get("MAC_CACHE")
    keeps = ("load", "first_pass") if os.environ.get("MAC_CACHE_KEEPS") == "all" else ("load",)
    if not folder or what not in keeps:
        return None
    parts = [what, os.path.realpath(path), os.environ.get("MAC_BUILD", ""), *details, *_content(Path(path))]
    return Path(folder) / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _content(path: Path) -> list[str]:
    found = []
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        status = file.stat()
        small = status.st_size <= SMALL
        mark = hashlib.sha256(file.read_bytes()).hexdigest() if small else str(status.st_mtime_ns)
        found.append(f"{file.relative_to(path)} {status.st_size} {mark}")
    return found
