"""One build at a time in a folder, and no garbage collection in a store while a job uses it.

Unlike lock files, these locks die with their processes, however those end. On NFS they are locks of a range of bytes: a
shared one needs a file that is open for reading, an exclusive one a file that is open for writing.

A job that waits in a scheduler's queue has no process and holds no lock. So every build leaves its mark in the folder
and in its environment, which its jobs inherit: one that begins after another build was begun changes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from shardmill.errors import ShardmillError
from shardmill.files import write_text

WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
RUN, MARK = "SHARDMILL_RUN", ".run"  # the variable and the file that say which build is the last

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
        os.environ[RUN] = uuid.uuid4().hex
        write_text(Path(build) / MARK, os.environ[RUN])
    _held.append(lock)


def join_build(build: str) -> None:
    """Marks this process as a job of the build in the folder.

    Raises ShardmillError where its build is not the last that was begun there. One that brings no mark is believed: not
    every executor hands on the environment.
    """
    jobs = _opened(build, ".jobs.lock")
    _flock(jobs, fcntl.LOCK_SH)
    own, mark = os.environ.get(RUN), Path(build) / MARK
    if own and mark.is_file() and mark.read_text() != own:
        jobs.close()
        raise ShardmillError(f"{build}: this job is of a build that was killed, and another was begun since; not run")
    _held.append(jobs)


@contextmanager
def using_store(store: Path) -> Iterator[None]:
    """Inside, nothing is collected from the store; waits for a collection that is under way."""
    try:
        lock = _opened(str(store), ".lock")
    except OSError:  # another user's store, or one that may only be read: it serves what it has
        if not (store / ".lock").is_file():
            raise
        lock = (store / ".lock").open()
    with lock:
        _flock(lock, fcntl.LOCK_SH)
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
    """Lock a file. Raise ShardmillError if its file system has no locks, as Lustre has none unless asked for them."""
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        raise ShardmillError(
            f"{file.name}: its file system has no locks ({error.strerror}); mount it with them (Lustre: -o flock), or "
            "build on another disk; docs/cluster.md says more"
        ) from error
