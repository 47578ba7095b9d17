"""Garbage collection: store entries that no build refers to, and what killed runs left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardmill.canonical import SCRATCH


@dataclass(frozen=True)
class Collected:
    """What was, or would be, removed."""

    entries: int
    bytes: int  # of files that no build links to; removing the others frees nothing


def referenced(builds: Path) -> set[str]:
    """Action keys in the receipts of every build under `builds`."""
    return {json.loads(path.read_text()).get("key", "") for path in builds.glob("*/**/*.receipt.json")}


def garbage(builds: Path) -> Iterator[Path]:
    """Folders of the store that nothing refers to, and scratch folders that killed runs left anywhere."""
    keep = referenced(builds)
    store = builds / ".store"
    for folder in sorted(store.iterdir() if store.is_dir() else ()):
        is_entry = (folder / "entry.json").is_file() or folder.name.startswith("tmp-")
        if folder.is_dir() and is_entry and folder.name not in keep:
            yield folder
    yield from sorted(folder for folder in builds.rglob(f"{SCRATCH}*") if folder.is_dir())


def collect(builds: Path, dry: bool = False) -> Collected:
    """Removes garbage from `builds`/.store. No build may be running: the caller holds the build lock."""
    entries = freed = 0
    for folder in garbage(builds):
        freed += sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and f.stat().st_nlink == 1)
        entries += 1
        if not dry:
            shutil.rmtree(folder)
    return Collected(entries, freed)
