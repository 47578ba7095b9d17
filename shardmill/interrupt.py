"""Ctrl-C and SIGTERM end the process with one line and the signal's exit code, even if a library catches them.

A person sends Ctrl-C; a scheduler sends SIGTERM when it takes a job's node away. Both raise KeyboardInterrupt wherever
the program is. A bare `except` in a library's import may swallow the interrupt, and the half-imported module fails
later with an unrelated error. So the interrupt is remembered (`happened`). A process that still runs GRACE seconds
later is ended by force, for instance in the middle of a long computation. Either way, its scratch folders (`scratch`)
and children (`ends_with_this_process`) end with the process.

None of this works while a library holds the interpreter's lock, as coremltools does while Core ML loads a program.
During such a call the system itself ends the process (`at_once`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 2.0  # seconds
_caught: list[int] = []  # the signals that came
_scratch: set[Path] = set()
_children: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def ends_this_process(line: str, terminal: int = 2) -> None:
    """Take over both signals; the file descriptor `terminal` gets `line` if the process has to be ended by force.

    Only the main thread of a process may take signals; elsewhere nothing changes.
    """

    def end() -> None:
        with suppress(OSError):
            os.write(terminal, f"{line}\n".encode())
        for child in tuple(_children):
            child.kill()
        for folder in tuple(_scratch):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(exit_code())

    def stop(number: int, frame: FrameType | None) -> None:
        _caught.append(number)
        if len(_caught) > 1:
            end()  # asked twice
        watch = threading.Timer(GRACE, end)
        watch.daemon = True
        watch.start()
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, stop)


def happened() -> bool:
    """Return whether a signal came: any later error is then a consequence."""
    return bool(_caught)


def exit_code() -> int:
    """Return the exit code that shells expect after the signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (_caught[0] if _caught else signal.SIGINT)


def ends_with_this_process(child: subprocess.Popen[bytes]) -> None:
    """Kill a child too if a signal ends this process by force."""
    _children.add(child)


@contextmanager
def at_once() -> Iterator[None]:
    """Let either signal end the process in the middle of a call that holds the interpreter's lock.

    Python's handlers wait for the lock. Only the main thread of a process may set signal handlers; in other threads
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _take_signals()
    before = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


@cache
def _take_signals() -> None:
    """Start a thread that takes the process's signals if a library blocks them in the thread of its call."""
    threading.Thread(target=threading.Event().wait, name="signals", daemon=True).start()


@contextmanager
def deferred() -> Iterator[None]:
    """Let a block run to its end before a signal that comes meanwhile is handled. It must not take long."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = [signal.signal(number, lambda number, frame: came.append(number)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
        for caught_number in came:
            signal.raise_signal(caught_number)


@contextmanager
def scratch(folder: Path) -> Iterator[None]:
    """Remove the folder at the end of the block, or with the process if a signal ends it before."""
    _scratch.add(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _scratch.discard(folder)


@contextmanager
def caught() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C inside the `with` block, so that the program may catch it and go on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
