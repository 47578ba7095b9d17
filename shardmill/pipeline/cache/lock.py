"""Locks of a build's folder: one build at a time, and none while jobs of a killed build still work there."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from pathlib import Path
from typing import TextIO

from shardmill.errors import ShardmillError
from shardmill.files import write_text

WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
RUN, MARK = "SHARDMILL_RUN", ".run"  # the variable and the file that say which build is the last

RUNNING = "another build is running there; wait for it or stop it"

_held: list[TextIO] = []  # open until the process ends


def hold_lock(build: str) -> None:
    """Make this the only build in the folder.

    Raises ShardmillError if another build is running there, or if jobs of a killed build still write there.
    """
    lock = _opened(build, ".lock")
    if not _locks(lock, fcntl.LOCK_EX):
        raise ShardmillError(f"{build}: {RUNNING}")
    with _opened(build, ".jobs.lock") as jobs:
        if not _locks(jobs, fcntl.LOCK_EX):
            lock.close()
            raise ShardmillError(f"{build}: jobs of a build that was killed are still running there; wait for them")
        os.environ[RUN] = uuid.uuid4().hex
        write_text(Path(build) / MARK, os.environ[RUN])
    _held.append(lock)


def check_free(build: str) -> None:
    """Raise ShardmillError if another build is running in the folder. Nothing keeps one from beginning afterwards."""
    with _opened(build, ".lock") as lock:
        if not _held and not _locks(lock, fcntl.LOCK_EX):  # what this process holds would refuse it, too
            raise ShardmillError(f"{build}: {RUNNING}")


def join_build(build: str) -> None:
    """Mark this process as a job of the build in the folder.

    Raises ShardmillError if another build was begun there after the job's build. A job without a mark is accepted,
    because not every executor passes the environment on.
    """
    jobs = _opened(build, ".jobs.lock")
    _flock(jobs, fcntl.LOCK_SH)
    run, mark = os.environ.get(RUN), Path(build) / MARK
    if run and mark.is_file() and mark.read_text() != run:
        jobs.close()
        raise ShardmillError(f"{build}: this job is of a build that was killed, and another was begun since; not run")
    _held.append(jobs)


def _opened(build: str, name: str) -> TextIO:
    folder = Path(build)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / name).exists() and not (folder / name).is_file():
        raise ShardmillError(f"{folder / name}: not a regular file, so nothing can be locked by it; remove it")
    return open(folder / name, "a+")


def _locks(file: TextIO, kind: int) -> bool:
    try:
        _flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _flock(file: TextIO, kind: int) -> None:
    """Lock a file. Raise ShardmillError if its file system has no locks, as Lustre by default."""
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        raise ShardmillError(
            f"{file.name}: its file system has no locks ({error.strerror}); mount it with them (Lustre: -o flock), or "
            "build on another disk; docs/many.md says more"
        ) from error
