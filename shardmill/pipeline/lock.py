"""One build at a time in a folder, and no garbage collection in a store while a job uses it.

Unlike lock files, these locks die with their processes, however those end. On NFS they are locks of a range of bytes: a
shared one needs a file that is open for reading, an exclusive one a file that is open for writing.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from shardmill.errors import ShardmillError

_held: list[TextIO] = []  # open until the process ends


def hold_lock(build: str) -> None:
    """Makes this the only build in the folder.

    Raises ShardmillError where there is another, or where one was killed whose jobs still write there.
    """
    lock = _opened(build, ".lock")
    if not _locks(lock, fcntl.LOCK_EX):
        raise ShardmillError(f"{build}: another build is running there; wait for it or stop it")
    with _opened(build, ".jobs.lock") as jobs:
        if not _locks(jobs, fcntl.LOCK_EX):
            lock.close()
            raise ShardmillError(f"{build}: jobs of a build that was killed are still running there; wait for them")
    _held.append(lock)


def join_build(build: str) -> None:
    """Marks this process as a job of the build in the folder."""
    jobs = _opened(build, ".jobs.lock")
    fcntl.flock(jobs, fcntl.LOCK_SH)
    _held.append(jobs)


@contextmanager
def using_store(store: Path) -> Iterator[None]:
    """Inside, nothing is collected from the store; waits for a collection that is under way."""
    with _opened(str(store), ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def hold_store(store: Path) -> None:
    """Keeps every job from the store until this process ends. Raises ShardmillError where one uses it now.

    Builds that share the store by a link lock their own folders only.
    """
    lock = _opened(str(store), ".lock")
    if not _locks(lock, fcntl.LOCK_EX):
        lock.close()
        raise ShardmillError(f"{store}: a build is using this store; wait for it or stop it")
    _held.append(lock)


def _opened(build: str, name: str) -> TextIO:
    folder = Path(build)
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / name, "a+")


def _locks(file: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
