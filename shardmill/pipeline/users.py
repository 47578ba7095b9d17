"""Which builds use a store. Several checkouts, on several machines, may share one by a link, and none knows of others.

Each folder of builds has a file in `<store>/users/` that says where it is. A folder of this machine that is gone, or
whose store is another by now, no longer counts; of one of another machine, that this one can't see, nobody knows.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.files import replacing

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
    return sorted({store.parent.resolve(), *_others(store)})


def _others(store: Path) -> Iterator[Path]:
    for file in sorted(path for path in (store / USERS).glob("*") if path.is_file()):
        path, inode, host = (*file.read_bytes().split(b"\0"), b"", b"")[:3]
        builds = Path(os.fsdecode(path))
        try:
            used, same = _is_used_by(builds, store), builds.stat().st_ino == int(inode or 0)
        except FileNotFoundError:
            used = same = False
        except OSError as error:
            raise _unseen(store, builds, f"can't be read ({error.strerror})", file) from error
        if not same and host.decode() != platform.node():
            raise _unseen(store, builds, f"of {host.decode() or 'another machine'} can't be seen from here", file)
        if used:
            yield builds


def _is_used_by(builds: Path, store: Path) -> bool:
    """Whether a folder of builds still has this store."""
    own = builds / store.name
    return own.exists() and own.samefile(store)


def _unseen(store: Path, builds: Path, why: str, file: Path) -> ShardmillError:
    return ShardmillError(
        f"{store}: is used by {builds}, which {why}; collect where it can be, or remove {file} if it is gone"
    )
