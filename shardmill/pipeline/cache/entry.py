"""An entry of the store: a folder named by its cache key, whose files are hashed, linked and never written again."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmill import interrupt
from shardmill.checkpoint.hashing import hash_file, tree_hashes
from shardmill.errors import ShardmillError
from shardmill.files import read_json, replacing, write_json

FOLDER = "blobs"  # the store's folder with a file for each content, named by its sha256
LEAST = 1 << 16  # bytes; smaller files are not shared


def share(store: Path, hashes: Mapping[Path, str]) -> None:
    """Link each file to the store's file with the same bytes; add files with new bytes to the store.

    Args:
        store: the store's folder.
        hashes: the files that were just written, with their sha256.
    """
    pool = store / FOLDER
    for file, sha256 in hashes.items():
        with contextlib.suppress(OSError):  # no hard links here, or too many to one file
            if file.stat().st_size < LEAST:
                continue
            pool.mkdir(exist_ok=True)
            pooled = pool / sha256
            if not pooled.exists():
                _replace(pooled, file)
            elif not pooled.samefile(file):  # between two links to one file a rename does nothing
                _replace(*((file, pooled) if hash_file(pooled) == sha256 else (pooled, file)))


def _replace(target: Path, source: Path) -> None:
    """Put a link to `source` in the place of `target`."""
    aside = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
    os.link(source, aside)
    os.replace(aside, target)


def unused(store: Path, going: Iterable[Path]) -> Iterator[Path]:
    """Yield shared files that nobody links to any more, once the files in `going` are gone."""
    links: dict[int, int] = {}
    for file in going:
        inode = file.lstat().st_ino
        links[inode] = links.get(inode, 0) + 1
    pool = store / FOLDER
    for file in sorted(pool.iterdir() if pool.is_dir() else ()):
        state = file.lstat()
        if state.st_nlink - links.get(state.st_ino, 0) <= 1:
            yield file


PREFIX, LOCK = "tmp-", "lock"


def aside(store: Path) -> Path:
    """Return a name in the store that is not taken, for a folder that is not an entry yet, or no longer."""
    return store / f"{PREFIX}{uuid.uuid4().hex}"


@contextmanager
def scratch_folder(store: Path) -> Iterator[Path]:
    """Yield a new folder in the store, which is gone at the end unless it was renamed.

    Folders that killed processes left behind are removed first.
    """
    store.mkdir(parents=True, exist_ok=True)
    _sweep(store)
    outer = aside(store)
    outer.mkdir()  # not mkdtemp, whose folders nobody else may read: builds may be shared
    with interrupt.scratch(outer), (outer / "new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (outer / "new").rename(outer / LOCK)  # locked before anybody looks for it
        inner = outer / "entry"
        inner.mkdir()
        yield inner


def _sweep(store: Path) -> None:
    """Remove scratch folders whose locks nobody holds."""
    for lock in store.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:  # in use, gone, or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


log = logging.getLogger(__name__)

ENTRY, STAMPS = "entry.json", "stamps.json"


def adopt(scratch: Path, entry: Path) -> None:
    """Make a scratch folder the entry; an intact one that another process made meanwhile stays."""
    if os.path.lexists(entry) and not intact(entry):
        drop(entry)
    try:
        scratch.rename(entry)
    except OSError:
        if not intact(entry):
            raise


def drop(entry: Path) -> None:
    """Remove an entry; nobody ever sees half an entry."""
    gone = aside(entry.parent)
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        entry.rename(gone)
    if gone.is_dir() and not gone.is_symlink():
        shutil.rmtree(gone, ignore_errors=True)
    else:  # rmtree leaves a link, and waits at a pipe for its writer
        gone.unlink(missing_ok=True)


def intact(entry: Path) -> bool:
    """Return whether every file of an entry seems to match the record.

    A file with unchanged size and modification time is accepted; any other file is hashed. This is enough to predict
    what a build would do; files that a build takes are hashed in any case, see `restored`.
    """
    try:
        recorded = read_entry(entry)
        if stamps(entry) == read_json(entry / STAMPS):
            return True
        same = [entry_description(entry / made["file"]) == made for made in recorded.values()]
        whole = bool(same) and all(same)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ShardmillError):
        whole = False
    if whole:
        with contextlib.suppress(OSError):  # a read-only store: hashed again the next time
            write_json(entry / STAMPS, stamps(entry))
    elif entry.exists():
        log.warning("damaged entry %s: not used", entry.name[:12])
    return whole


def restored(entry: Path, outputs: Mapping[str, Path]) -> bool:
    """Put an entry's files at `outputs`, checked against the recorded hashes; drop an entry that does not match.

    Bit rot on a disk changes neither size nor time, so only the bytes show it.
    """
    try:
        recorded = read_entry(entry)
        for name, path in outputs.items():
            _place_entry(entry / recorded[name]["file"], path, recorded[name])
    except (FileNotFoundError, ShardmillError, KeyError, TypeError, AttributeError) as error:
        log.warning("damaged entry %s: %s", entry.name[:12], error)
        drop(entry)
        return False
    return True


def entry_description(path: Path) -> dict[str, Any]:
    """Return an output's record: its sha256, its name in the entry and, for a folder, each file's sha256."""
    sha, files = tree_hashes(path)
    return {"sha256": sha, "file": path.name, "files": files}


def hashes_of(path: Path, recorded: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Return each file of an output with its sha256."""
    return [(path / file, sha) for file, sha in recorded["files"].items()] or [(path, recorded["sha256"])]


def read_entry(entry: Path) -> dict[str, dict[str, Any]]:
    """Return output name -> the output's recorded description."""
    content: dict[str, dict[str, Any]] = read_json(entry / ENTRY)
    return content


def output_files(entry: Path) -> dict[str, str]:
    """Return path in the entry -> sha256 for every file of the entry's outputs."""
    recorded = read_entry(entry).values()
    hashes = [hashes_of(Path(one["file"]), one) for one in recorded]
    return {path.as_posix(): sha256 for pairs in hashes for path, sha256 in pairs}


def files_of(entry: Path) -> list[Path]:
    """Return all files of an entry but its stamps, sorted."""
    return sorted(f for f in entry.rglob("*") if f.is_file() and f != entry / STAMPS)


def stamps(entry: Path) -> dict[str, list[int]]:
    """Return size and modification time of every file of an entry, with its record. Hard links change neither."""
    stats = {file.relative_to(entry).as_posix(): file.stat() for file in files_of(entry)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def stored(name: str, path: Path) -> str:
    """Return an output's name in its entry; it keeps the suffix, because libraries choose the file format by it."""
    return name + path.suffix


def _place_entry(source: Path, target: Path, recorded: Mapping[str, Any]) -> None:
    """Put a stored file or folder at `target`: the files of a folder as hard links if the file system has hard links.

    A file is copied. Snakemake sets the time of every output file; through a link this would make other builds look
    old. Snakemake also refuses to make a write-protected output again, and stored files are write-protected.
    Raises ShardmillError, with `target` as it was, if the bytes differ from the recorded bytes.
    """
    with replacing(target) as temporary:
        if source.is_dir():
            shutil.copytree(source, temporary, copy_function=_link_file, symlinks=True)
            for folder, _, _ in os.walk(temporary):
                os.chmod(folder, 0o777 & os.stat(folder).st_mode | 0o700)  # folders in the store may be read-only
        else:
            shutil.copyfile(source, temporary)
        if tree_hashes(temporary) != (recorded["sha256"], recorded["files"]):
            raise ShardmillError(f"{source.name} is not what was recorded")


def _link_file(source: str, target: str) -> None:
    """Make a hard link, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
