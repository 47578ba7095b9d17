"""The hash cache is a memory of files that did not change, and of nothing else."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardmill.checkpoint import hashing
from shardmill.checkpoint.cache import RACY_NS, ByteSpan, FileState, HashCache, file_state
from shardmill.checkpoint.hashing import hash_file

HOUR_AGO = time.time_ns() - 3_600_000_000_000


class Watched:
    """A settled file, its cache, and a count of how often bytes were really read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = 0
        self.shift = 0
        self.path = folder / "weights"
        self.cache = HashCache(folder / "cache" / "hashes.sqlite")
        digest = hashing._digest_span

        def counted(path: Path, span: ByteSpan) -> object:
            self.reads += 1
            return digest(path, span)

        monkeypatch.setattr(hashing, "_digest_span", counted)
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + self.shift)
        self.path.write_bytes(b"one")

    def settle(self) -> None:
        """Lets the clock run on past the time in which a write could hide."""
        self.shift += RACY_NS + 1_000_000_000

    def hash(self, path: Path | None = None) -> str:
        return hash_file(path or self.path, self.cache)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_unchanged_file_is_read_once(watched: Watched) -> None:
    watched.settle()
    assert watched.hash() == watched.hash()
    assert watched.reads == 1


def test_fresh_file_is_not_trusted(watched: Watched) -> None:
    """A file written a moment ago may be written again within the same tick of the clock."""
    watched.hash()
    watched.hash()
    assert watched.reads == 2


def test_fresh_file_with_an_old_mtime_is_not_trusted(watched: Watched) -> None:
    """Copying tools put old mtimes on new files; ctime tells."""
    os.utime(watched.path, ns=(HOUR_AGO, HOUR_AGO))
    watched.hash()
    watched.hash()
    assert watched.reads == 2


def test_file_from_the_future_is_not_trusted(watched: Watched) -> None:
    os.utime(watched.path, ns=(0, time.time_ns() + 10**15))
    watched.settle()
    watched.hash()
    watched.hash()
    assert watched.reads == 2


def rewrite_and_restore_mtime(path: Path) -> None:
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replace_with_same_mtime(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"two")
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"two"),
        lambda path: path.write_bytes(b"longer"),
        rewrite_and_restore_mtime,
        replace_with_same_mtime,
    ],
    ids=["same size", "other size", "mtime put back", "replaced"],
)
def test_changed_file_is_read_again(watched: Watched, change: Callable[[Path], object]) -> None:
    """However the content changed, even with the mtime of before, the hash is that of the new content."""
    watched.settle()
    before = watched.hash()
    change(watched.path)
    after = watched.hash()
    assert after != before and after == hash_file(watched.path)


def test_hard_link_keeps_the_entry(watched: Watched) -> None:
    """Linking moves ctime; `carry` tells the cache that the bytes did not."""
    watched.settle()
    watched.hash()
    before = file_state(watched.path)
    time.sleep(0.02)  # let ctime tick
    link = watched.path.with_name("link")
    os.link(watched.path, link)
    after = file_state(link)
    assert after.ctime != before.ctime
    watched.cache.carry(before, after)
    assert watched.hash(link) == watched.hash()
    assert watched.reads == 1


def test_the_spans_of_a_copy_are_those_of_the_original(watched: Watched, tmp_path: Path) -> None:
    """A checkpoint in another folder: each file is read once, for its own sha256, and no tensor again."""
    span = ByteSpan(1, 3)
    watched.settle()
    found = hashing._digest_spans({watched.path: [ByteSpan(0, 3), span]}, watched.cache, 1)
    copy = tmp_path / "copy"
    copy.write_bytes(b"one")
    watched.settle()
    assert watched.hash(copy) == watched.hash()
    reads = watched.reads
    assert hashing._digest_spans({copy: [span]}, watched.cache, 1)[copy, span] == found[watched.path, span]
    assert watched.reads == reads


def test_spans_hashed_later_than_the_whole_are_known_of_copies_too(watched: Watched, tmp_path: Path) -> None:
    span, copy = ByteSpan(1, 3), tmp_path / "copy"
    copy.write_bytes(b"one")
    watched.settle()
    for path in (watched.path, copy):
        watched.hash(path)
    hashing._digest_spans({watched.path: [span]}, watched.cache, 1)
    reads = watched.reads
    hashing._digest_spans({copy: [span]}, watched.cache, 1)
    assert watched.reads == reads


def test_spans_of_other_bytes_are_not_taken(watched: Watched, tmp_path: Path) -> None:
    span, other = ByteSpan(1, 3), tmp_path / "other"
    other.write_bytes(b"two")
    watched.settle()
    found = hashing._digest_spans({watched.path: [ByteSpan(0, 3), span]}, watched.cache, 1)
    watched.hash(other)
    assert hashing._digest_spans({other: [span]}, watched.cache, 1)[other, span] != found[watched.path, span]


def test_carry_keeps_nothing_of_another_content(watched: Watched) -> None:
    """A write between the two looks shows in size or mtime, and then nothing is carried over."""
    watched.settle()
    old = watched.hash()
    before = file_state(watched.path)
    time.sleep(0.02)
    watched.path.write_bytes(b"two")
    watched.cache.carry(before, file_state(watched.path))
    assert watched.hash() != old


def test_old_states_are_forgotten(watched: Watched) -> None:
    """The cache does not grow with every version of a file."""
    cache, old = watched.cache, FileState("1", 2, 3, HOUR_AGO, HOUR_AGO)
    new = FileState("1", 2, 3, HOUR_AGO + 1, HOUR_AGO + 1)
    cache.record(old, {ByteSpan(0, 3): "a" * 64}, time.time_ns())
    cache.record(new, {ByteSpan(0, 3): "b" * 64}, time.time_ns())
    assert cache.lookup(old) == {} and cache.lookup(new) == {ByteSpan(0, 3): "b" * 64}


def test_finite_check_is_part_of_the_key(watched: Watched) -> None:
    """Bytes once hashed without a look at their numbers do not count as checked."""
    state = FileState("1", 2, 8, HOUR_AGO, HOUR_AGO)
    watched.cache.record(state, {ByteSpan(0, 8): "a" * 64}, time.time_ns())
    assert ByteSpan(0, 8, "BF16") not in watched.cache.lookup(state)


@pytest.mark.parametrize("damage", [b"no database", b"SQLite format 3\0" + b"\xff" * 2000])
def test_damaged_cache_is_begun_anew(watched: Watched, damage: bytes) -> None:
    watched.settle()
    right = watched.hash()
    watched.cache.path.write_bytes(damage)
    assert watched.hash() == right == watched.hash() == watched.hash()
    assert watched.reads <= 3


@pytest.mark.parametrize("rotten", ["NULL", "x'00'", "1", "'text'"])
def test_a_row_that_holds_no_hash_is_not_taken(watched: Watched, rotten: str) -> None:
    watched.settle()
    right = watched.hash()
    with contextlib.closing(sqlite3.connect(watched.cache.path)) as db, db:
        db.execute(f"UPDATE hashes SET sha256 = {rotten}")
    assert watched.hash() == right and watched.reads == 2


def test_unusable_cache_is_done_without(watched: Watched, tmp_path: Path) -> None:
    """A cache that can't be written costs time only."""
    (tmp_path / "file").write_bytes(b"")
    cache = HashCache(tmp_path / "file" / "hashes.sqlite")
    assert hash_file(watched.path, cache) == hash_file(watched.path)


def test_many_writers(watched: Watched) -> None:
    """Several processes or threads may record at once, and every entry is there afterwards."""
    states = [FileState("1", inode, 3, HOUR_AGO, HOUR_AGO) for inode in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda s: watched.cache.record(s, {ByteSpan(0, 3): f"{s.inode:064d}"}, time.time_ns()), states))
    assert [watched.cache.lookup(s) for s in states] == [{ByteSpan(0, 3): f"{s.inode:064d}"} for s in states]
