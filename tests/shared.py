"""A folder for what all tests of a run share, whichever of pytest's workers they run in."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

NAME = "SHARDMILL_TESTS_SHARED"  # pytest's workers inherit it from the process that started them
_IS_OURS = NAME not in os.environ
if _IS_OURS:
    os.environ[NAME] = tempfile.mkdtemp(prefix="shardmill-tests-")
FOLDER = Path(os.environ[NAME])


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder of that name. Whichever process asks first makes it, under another name; the others wait for it."""
    folder = FOLDER / name
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=FOLDER))
            make(made)
            made.rename(folder)
    return folder


def remove() -> None:
    """Removes all of it, in the process that made it."""
    if _IS_OURS:
        shutil.rmtree(FOLDER, ignore_errors=True)
