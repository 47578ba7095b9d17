"""Which builds use a store. Several checkouts, on several machines, may share one by a link, and none knows of others.

Each folder of builds has a file in `<store>/users/` that says where it is. A folder of this machine that is gone, or
whose store is another by now, no longer counts; of one of another machine, that this one can't see, or on a disk that
seems not to be mounted, nobody knows.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.files import replacing

log = logging.getLogger(__name__)
USERS = "users"


def register(store: Path) -> None:
    """Notes that the builds beside `store`, which may be a link to the real one, use it.

    Folders on two machines may have the same path, so they are told apart by their inodes. Raises OSError where the
    store may not be written to.
    """
    builds = store.parent.resolve()
    place = b"%s\0%d" % (os.fsencode(builds), builds.stat().st_ino)
    file = store / USERS / hashlib.sha256(place).hexdigest()[:32]
    if not file.is_file():
        with replacing(file) as temporary:
            temporary.write_bytes(place + b"\0" + platform.node().encode())


def users(store: Path) -> list[Path]:
    """The folders of builds that use a store. Raises ShardmillError where one can't be seen from this machine."""
    notes = list(_notes(store))
    for _, builds, _ in notes:
        if not builds.exists():
            log.warning("%s used this store and is gone; if it was moved, build or collect there first", builds)
    return sorted({store.parent.resolve(), *(builds for _, builds, used in notes if used)})


def forget(store: Path) -> None:
    """Removes the notes of folders that no longer count. What they kept is gone, so they have nothing more to say."""
    for file, _, used in _notes(store):
        if not used:
            file.unlink()


def _notes(store: Path) -> Iterator[tuple[Path, Path, bool]]:
    """Each file in `users/` with its folder of builds, and whether that still uses the store."""
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
    """The folder, its inode and its machine's name, of a file in `users/`. Raises ShardmillError for a damaged one."""
    path, inode, host = (*file.read_bytes().split(b"\0"), b"", b"")[:3]
    try:
        return Path(os.fsdecode(path)), int(inode or 0), host.decode()
    except ValueError as error:
        what = (
            "damaged, so which build it stands for is not known; remove it, and build again wherever the store is used"
        )
        raise ShardmillError(f"{file}: {what}") from error


def _empty_place(builds: Path) -> Path | None:
    """The folder above one that is gone, if it is empty: so is the place where a disk is not mounted."""
    place = next(parent for parent in builds.parents if parent.exists())
    return place if place.is_dir() and not any(place.iterdir()) else None


def _is_used_by(builds: Path, store: Path) -> bool:
    """Whether a folder of builds still has this store."""
    own = builds / store.name
    return own.exists() and own.samefile(store)


def _unseen(store: Path, builds: Path, why: str, file: Path) -> ShardmillError:
    return ShardmillError(
        f"{store}: is used by {builds}, which {why}; collect where it can be, or remove {file} if it is gone"
    )
