"""One build at a time in a folder. Unlike lock files, these locks die with their processes, however those end."""

from __future__ import annotations

import fcntl
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


def _opened(build: str, name: str) -> TextIO:
    folder = Path(build)
    folder.mkdir(exist_ok=True)
    return open(folder / name, "w")


def _locks(file: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
