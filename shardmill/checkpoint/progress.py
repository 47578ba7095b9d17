"""Says how far a long download is, in lines that suit a log as well as a terminal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def reporting(name: str, path: Path, size: int, seconds: float = 10.0) -> Iterator[None]:
    """Inside, logs every `seconds` how many of `size` bytes the file at `path` holds."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(seconds):
            held = path.stat().st_size if path.exists() else 0
            log.info("%s: %.2f of %.2f GB", name, held / 1e9, size / 1e9)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
