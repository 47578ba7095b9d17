"""Files of the same bytes are kept once: entries of the store share them by hard links.

An encoder's programs differ in their graphs and have one weight file in common, and a compiled bundle has that of its
package. Where the file system has no hard links, each keeps its own.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from shardmill.checkpoint.hashing import hash_file

FOLDER = "blobs"  # of the store: a file for each content, named by its sha256
LEAST = 1 << 16  # bytes of a file that is worth sharing


def share(store: Path, hashes: Mapping[Path, str]) -> None:
    """Makes files links to those of the same bytes that the store has, and keeps the others for who comes later.

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
            kept = pool / sha256
            if not kept.exists():
                _replace(kept, file)
            elif not kept.samefile(file):  # between two links to one file a rename does nothing
                _replace(*((file, kept) if hash_file(kept) == sha256 else (kept, file)))


def _replace(target: Path, source: Path) -> None:
    """Puts a link to `source` in the place of `target`."""
    aside = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
    os.link(source, aside)
    os.replace(aside, target)


def unused(store: Path, going: Iterable[Path]) -> Iterator[Path]:
    """Shared files that nobody links to any more, once the files in `going` are gone."""
    links: dict[int, int] = {}
    for file in going:
        inode = file.lstat().st_ino
        links[inode] = links.get(inode, 0) + 1
    pool = store / FOLDER
    for file in sorted(pool.iterdir() if pool.is_dir() else ()):
        state = file.lstat()
        if state.st_nlink - links.get(state.st_ino, 0) <= 1:
            yield file
