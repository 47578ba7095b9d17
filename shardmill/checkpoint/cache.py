"""Remembers the sha256 of byte ranges, so that gigabytes that did not change are not read again.

An entry counts only while the file is unchanged: same file system, inode, size, mtime and ctime (ctime changes
even if a writer restores mtime). A file written less than RACY_NS before it was hashed is not remembered. A second
write could hide within one tick of the file system's clock, as git describes for its index
(https://git-scm.com/docs/racy-git). The hashes of a file's ranges count for every file with the same sha256.
Losing the cache costs time, never correctness.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardmill import files
from shardmill.errors import CheckpointError

MOUNTS = Path("/proc/self/mountinfo")  # Linux only
OF_A_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "fuse.glusterfs", "wekafs", "9p")
)


def volume(device: int, path: Path) -> str:
    """Name a file system.

    Args:
        device: the file system's device number on this machine.
        path: a file in the file system.

    Returns:
        On a Mac, the volume's topmost folder and creation time; otherwise the source of a network, or the number.
    """
    return _of_a_mac(device, path.resolve()) if sys.platform == "darwin" else _mounted(device)


def _of_a_mac(device: int, path: Path) -> str:
    """Name the topmost folder of a file's volume, and when it was made: disks may be mounted at one place in turn."""
    *_, top = (folder for folder in (path, *path.parents) if os.stat(folder).st_dev == device)
    return f"{top} {getattr(os.stat(top), 'st_birthtime', 0)}"


@cache
def _mounted(device: int) -> str:
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return str(device)
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        # 36 35 98:0 /root /mounted/at options [optional fields] - type source options
        before, _, after = line.partition(" - ")
        kind, source, *_ = (*after.split(), "", "")
        if before.split()[2:3] == [number] and kind in OF_A_NETWORK:
            return _unescaped(source)
    return str(device)


def _unescaped(text: str) -> str:
    """Return a path of the mount table without its octal escapes; the kernel writes spaces as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


RACY_NS = 2_000_000_000
CONTENT = "content"  # stands for any file; its state is the sha256 of the whole file
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCHEMA = """CREATE TABLE IF NOT EXISTS hashes (
    file TEXT, state TEXT, first INTEGER, last INTEGER, dtype TEXT, sha256 TEXT,
    PRIMARY KEY (file, state, first, last, dtype)) WITHOUT ROWID"""


@dataclass(frozen=True)
class FileState:
    """The metadata of a file, known without reading the file; times in ns since 1970."""

    volume: str  # the file system's name, the same on all machines that share it
    inode: int
    size: int
    mtime: int
    ctime: int

    @property
    def file(self) -> str:
        """Return the file's identity, which stays when the file is written or renamed."""
        return f"{self.volume}:{self.inode}"

    @property
    def state(self) -> str:
        """Return the file's version, which changes when the file is written."""
        return f"{self.size}:{self.mtime}:{self.ctime}"

    def same_content(self, other: FileState) -> bool:
        """Return whether nothing was written between two states.

        A new hard link or other permissions change ctime only.
        """
        return (self.file, self.size, self.mtime) == (other.file, other.size, other.mtime)

    def is_settled(self, now: int) -> bool:
        """Return whether a write from `now` on is sure to show in mtime or ctime."""
        return now - max(self.mtime, self.ctime) > RACY_NS


@dataclass(frozen=True)
class ByteSpan:
    """Bytes [start, end) of a file; with a dtype, they were also checked to hold only finite numbers."""

    start: int
    end: int
    dtype: str = ""


def file_state(path: Path) -> FileState:
    """Return the state of a file. Raises CheckpointError if it is no regular file, or can't be accessed."""
    try:
        files.check(path)
        stat = os.stat(path)
        place = volume(stat.st_dev, path)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror}); fetch it again") from error
    return FileState(place, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class HashCache:
    """A small SQLite file that any number of processes and threads may use at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lookup(self, state: FileState) -> dict[ByteSpan, str]:
        """Return every remembered span of the file in exactly this state -> its sha256.

        If the sha256 of the whole file is remembered, spans of other files with the same bytes count, too.
        """
        spans = self._spans(state.file, state.state)
        whole = spans.get(ByteSpan(0, state.size))
        return (self._spans(CONTENT, whole) if whole else {}) | spans

    def record(self, state: FileState, hashes: Mapping[ByteSpan, str], began: int) -> None:
        """Remember `hashes` if the file had settled when hashing `began` (ns); forget the file's older states."""
        if not hashes or not state.is_settled(began):
            return
        forget = ("DELETE FROM hashes WHERE file = ? AND state <> ?", (state.file, state.state))
        keys = [(state.file, state.state)]
        whole = hashes.get(ByteSpan(0, state.size)) or self.lookup(state).get(ByteSpan(0, state.size))
        if whole:
            keys.append((CONTENT, whole))
        insert = "INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?, ?)"
        rows = [(*key, span.start, span.end, span.dtype, sha) for key in keys for span, sha in hashes.items()]
        self._run([forget, *((insert, row) for row in rows)])

    def carry(self, before: FileState, after: FileState) -> None:
        """Keep the entries of a file whose ctime we moved ourselves by giving it one more hard link."""
        # A write between the two looks at the file would have brought its mtime up to the present.
        if before.same_content(after) and before.is_settled(time.time_ns()):
            query = "UPDATE OR REPLACE hashes SET state = ? WHERE file = ? AND state = ?"
            self._run([(query, (after.state, after.file, before.state))])

    def _spans(self, file: str, state: str) -> dict[ByteSpan, str]:
        query = "SELECT first, last, dtype, sha256 FROM hashes WHERE file = ? AND state = ?"
        rows = self._run([(query, (file, state))])
        return {ByteSpan(a, b, dtype): sha for a, b, dtype, sha in rows if _SHA256.fullmatch(str(sha))}

    def _run(self, statements: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Run statements in one transaction; return the last one's rows, or an empty list if the cache fails."""
        rows: list[Any] = []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(self.path, timeout=30)) as db, db:
                db.execute(_SCHEMA)
                for query, values in statements:
                    rows = db.execute(query, values).fetchall()
        except (sqlite3.OperationalError, OSError):
            return []  # read-only, full, or busy for too long: work without the cache
        except sqlite3.DatabaseError:
            self.path.unlink(missing_ok=True)  # damaged: begin anew
            return []
        return rows
