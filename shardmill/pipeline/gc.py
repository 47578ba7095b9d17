"""Garbage collection: store entries that no build refers to, templates of other tools, what killed runs left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardmill.convert.template import cache
from shardmill.errors import ShardmillError
from shardmill.files import SCRATCH
from shardmill.pipeline.store import TEMPLATES


@dataclass(frozen=True)
class Collected:
    """What was, or would be, removed."""

    entries: int
    bytes: int  # of files that no build links to; removing the others frees nothing


def referenced(builds: Path) -> set[str]:
    """Action keys in the receipts of every build under `builds`."""
    return {action_key(path) for path in builds.glob("*/**/*.receipt.json")}


def action_key(receipt: Path) -> str:
    """The key that a receipt names, "" for that of a step without one. Raises ShardmillError for a damaged receipt.

    What a damaged one refers to is not known, so nothing may be removed while it is there.
    """
    try:
        key = json.loads(receipt.read_text(encoding="utf-8")).get("key", "")
        if not isinstance(key, str):
            raise ValueError(f"key is {key!r}")
    except (OSError, ValueError, AttributeError) as error:
        what = "damaged, so what it refers to is not known; remove it and build again, then collect"
        raise ShardmillError(f"{receipt}: {what}") from error
    return key


def garbage(builds: Path) -> Iterator[Path]:
    """What of the store nothing refers to, and scratch folders that killed runs left anywhere."""
    keep = referenced(builds)
    store = builds / ".store"
    for folder in sorted(store.iterdir() if store.is_dir() else ()):
        is_entry = (folder / "entry.json").is_file() or folder.name.startswith("tmp-")
        if folder.is_dir() and is_entry and folder.name not in keep:
            yield folder
    yield from cache.outdated(store / TEMPLATES)
    yield from sorted(folder for folder in builds.rglob(f"{SCRATCH}*") if folder.is_dir())


def collect(builds: Path, dry: bool = False) -> Collected:
    """Removes garbage from `builds`/.store. No build may be running: the caller holds the build lock."""
    entries = freed = 0
    for path in garbage(builds):
        files = [path, *path.rglob("*")]
        freed += sum(f.stat().st_size for f in files if f.is_file() and f.stat().st_nlink == 1)
        entries += 1
        if not dry:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return Collected(entries, freed)
