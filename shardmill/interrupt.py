"""Ctrl-C ends the process, with exit code 130 and one line, whatever a library does about it.

Python raises KeyboardInterrupt wherever the program is. A bare `except` in a library's import may swallow it, and what
was half imported fails later with an error that nobody asked for. So the interrupt is remembered (`happened`), and a
process that is still there GRACE seconds later is ended: until then scratch folders can be removed on the way out.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_CODE = 130
GRACE = 2.0  # seconds
_happened = threading.Event()


def ends_this_process(line: str, terminal: int = 2) -> None:
    """Takes over Ctrl-C; `line` is what the file descriptor `terminal` gets if the process has to be ended by force.

    Only the main thread of a process may take signals; elsewhere nothing changes.
    """

    def end() -> None:
        with suppress(OSError):
            os.write(terminal, f"{line}\n".encode())
        os._exit(EXIT_CODE)

    def stop(number: int, frame: FrameType | None) -> None:
        if _happened.is_set():
            end()  # asked twice
        _happened.set()
        watch = threading.Timer(GRACE, end)
        watch.daemon = True
        watch.start()
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, stop)


def happened() -> bool:
    """Whether Ctrl-C was pressed: an error that comes after it is of its making."""
    return _happened.is_set()


@contextmanager
def caught() -> Iterator[None]:
    """Inside, Ctrl-C is a KeyboardInterrupt that the program may catch and go on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
