"""The builds that use a store. Several checkouts, on several machines, may share a store without knowing each other.

Each folder of builds has a file in `<store>/users/` that gives the folder's path. A folder of this machine no longer
counts if it is gone or has another store by now. Nobody can tell whether a folder still counts if this machine can't
see it: if it is on another machine, or on a disk that seems not to be mounted.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import platform
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from shardmill.errors import ShardmillError
from shardmill.files import replacing, write_text

log = logging.getLogger(__name__)
USERS = "users"


def register(store: Path) -> None:
    """Record that the builds beside `store`, which may be a link to the real one, use it.

    Folders on two machines may have the same path, so their inodes tell them apart. Raises OSError if the store
    is read-only.
    """
    builds = store.parent.resolve()
    place = b"%s\0%d" % (os.fsencode(builds), builds.stat().st_ino)
    file = store / USERS / hashlib.sha256(place).hexdigest()[:32]
    if not file.is_file():
        with replacing(file) as temporary:
            temporary.write_bytes(place + b"\0" + platform.node().encode())


def users(store: Path) -> list[Path]:
    """Return the folders of builds that use a store.

    Raises ShardmillError where one can't be seen from this machine.
    """
    notes = list(_notes(store))
    for _, builds, _ in notes:
        if not builds.exists():
            log.warning("%s used this store and is gone; if it was moved, build or collect there first", builds)
    return sorted({store.parent.resolve(), *(builds for _, builds, used in notes if used)})


def forget(store: Path) -> None:
    """Remove the notes of folders that no longer count."""
    for file, _, used in _notes(store):
        if not used:
            file.unlink()


def _notes(store: Path) -> Iterator[tuple[Path, Path, bool]]:
    """Yield each file in `users/` with its folder of builds, and whether the folder still uses the store."""
    for file in sorted(path for path in (store / USERS).glob("*") if path.is_file()):
        builds, inode, host = _read(file)
        try:
            used, same = _is_used_by(builds, store), builds.stat().st_ino == inode
        except FileNotFoundError:
            used = same = False
        except OSError as error:
            raise _unseen(store, builds, f"can't be read ({error.strerror})", file) from error
        if not same and host != platform.node():
            raise _unseen(store, builds, f"of {host or 'another machine'} can't be seen from here", file)
        if not builds.exists() and (place := _empty_place(builds)) is not None:
            raise _unseen(store, builds, f"is gone with all that was in {place}, where a disk may be missing", file)
        yield file, builds, used


def _read(file: Path) -> tuple[Path, int, str]:
    """Return the folder, its inode and its machine's name, of a file in `users/`.

    Raises ShardmillError for a damaged one.
    """
    path, inode, host = (*file.read_bytes().split(b"\0"), b"", b"")[:3]
    try:
        return Path(os.fsdecode(path)), int(inode or 0), host.decode()
    except ValueError as error:
        what = (
            "damaged, so which build it stands for is not known; remove it, and build again wherever the store is used"
        )
        raise ShardmillError(f"{file}: {what}") from error


def _empty_place(builds: Path) -> Path | None:
    """Return the folder above a missing folder if it is empty, as the mount point of an unmounted disk is."""
    place = next(parent for parent in builds.parents if parent.exists())
    return place if place.is_dir() and not any(place.iterdir()) else None


def _is_used_by(builds: Path, store: Path) -> bool:
    """Return whether a folder of builds still has this store."""
    own = builds / store.name
    return own.exists() and own.samefile(store)


def _unseen(store: Path, builds: Path, why: str, file: Path) -> ShardmillError:
    return ShardmillError(
        f"{store}: is used by {builds}, which {why}; collect where it can be, or remove {file} if it is gone"
    )


WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
RUN, MARK = "SHARDMILL_RUN", ".run"  # the variable and the file that say which build is the last

_held: list[TextIO] = []  # open until the process ends


def hold_lock(build: str) -> None:
    """Make this the only build in the folder.

    Raises ShardmillError if another build is running there, or if jobs of a killed build still write there.
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
    """Mark this process as a job of the build in the folder.

    Raises ShardmillError if another build was begun there after the job's build. A job without a mark is accepted,
    because not every executor passes the environment on.
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
    """Keep garbage collection from the store inside the context; wait for a collection that is under way."""
    try:
        lock = _opened(str(store), ".lock")
    except OSError:  # another user's store, or a read-only one: its present entries are used
        if not (store / ".lock").is_file():
            raise
        lock = (store / ".lock").open()
    with lock:
        _flock(lock, fcntl.LOCK_SH)
        yield


def hold_store(store: Path) -> None:
    """Keep every job from the store until this process ends. Raises ShardmillError if a job uses the store now.

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
    """Lock a file. Raise ShardmillError if its file system has no locks, as Lustre by default."""
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        raise ShardmillError(
            f"{file.name}: its file system has no locks ({error.strerror}); mount it with them (Lustre: -o flock), or "
            "build on another disk; docs/cluster.md says more"
        ) from error
