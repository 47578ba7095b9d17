"""Folders of the store in which jobs make what becomes entries.

Whoever makes one holds a lock on a file in it. A process that is killed lets go of its lock, on whatever machine, so
the next one that wants a scratch folder knows which nobody uses any more, and removes them: on a cluster that preempts
jobs, nobody has to wait until no build runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmill import interrupt

PREFIX, LOCK = "tmp-", "lock"


def aside(store: Path) -> Path:
    """A name in the store that nothing has, for what is not an entry yet, or no longer."""
    return store / f"{PREFIX}{uuid.uuid4().hex}"


@contextmanager
def scratch_folder(store: Path) -> Iterator[Path]:
    """A new folder in the store, which is gone at the end unless it was renamed; those of killed processes go first."""
    store.mkdir(parents=True, exist_ok=True)
    _sweep(store)
    outer = aside(store)
    outer.mkdir()  # not mkdtemp, whose folders nobody else may read: builds may be shared
    with interrupt.scratch(outer), (outer / "new").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (outer / "new").rename(outer / LOCK)  # locked before anybody looks for it
        inner = outer / "entry"
        inner.mkdir()
        yield inner


def _sweep(store: Path) -> None:
    """Removes scratch folders whose locks nobody holds."""
    for lock in store.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:  # in use, gone, or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
