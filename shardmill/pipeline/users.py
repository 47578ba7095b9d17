"""Which builds use a store. Several checkouts may share one by a link, and none knows of the others.

Each folder of builds has a file in `<store>/users/` that holds its path. A folder that is gone, or whose store is
another by now, no longer counts.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shardmill.files import replacing

USERS = "users"


def register(store: Path) -> None:
    """Notes that the builds beside `store`, which may be a link to the real one, use it."""
    builds = os.fsencode(store.parent.resolve())
    file = store / USERS / hashlib.sha256(builds).hexdigest()[:32]
    if not file.is_file():
        with replacing(file) as temporary:
            temporary.write_bytes(builds)


def users(store: Path) -> list[Path]:
    """The folders of builds that use a store."""
    noted = {Path(os.fsdecode(file.read_bytes())) for file in (store / USERS).glob("*") if file.is_file()}
    return sorted(builds for builds in {store.parent.resolve(), *noted} if _is_used_by(builds, store))


def _is_used_by(builds: Path, store: Path) -> bool:
    """Whether a folder of builds still has this store."""
    own = builds / store.name
    return own.exists() and own.samefile(store)
