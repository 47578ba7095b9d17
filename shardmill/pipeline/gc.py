"""Garbage collection: store entries that no build refers to, templates of other tools, what killed runs left behind."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardmill.errors import ShardmillError, UnreadableError
from shardmill.files import SCRATCH, digest, read_json
from shardmill.models import supported
from shardmill.pipeline import fingerprint
from shardmill.pipeline.store import TEMPLATES
from shardmill.pipeline.table import STEPS
from shardmill.pipeline.users import users


@dataclass(frozen=True)
class Collected:
    """What was, or would be, removed."""

    entries: int
    bytes: int  # of files that no build links to; removing the others frees nothing


def _referenced(builds: Path) -> set[str]:
    """Action keys in the receipts of every build under `builds`."""
    return {_action_key(path) for path in builds.glob("*/**/*.receipt.json")}


def _action_key(receipt: Path) -> str:
    """The key that a receipt names, "" for that of a step without one. Raises ShardmillError for a damaged receipt.

    What a damaged one refers to is not known, so nothing may be removed while it is there.
    """
    try:
        key = read_json(receipt).get("key", "")
        if not isinstance(key, str):
            raise TypeError(f"key is {key!r}")
    except (UnreadableError, AttributeError, TypeError) as error:
        what = "damaged, so what it refers to is not known; remove it and build again, then collect"
        raise ShardmillError(f"{receipt}: {what}") from error
    return key


def garbage(builds: Path) -> Iterator[Path]:
    """What of the store no build that uses it refers to, and scratch folders that killed runs left here."""
    store = builds / ".store"
    keep = {key for user in users(store) for key in _referenced(user)}
    for folder in sorted(store.iterdir() if store.is_dir() else ()):
        is_entry = (folder / "entry.json").is_file() or folder.name.startswith("tmp-")
        if folder.is_dir() and is_entry and folder.name not in keep:
            yield folder
    yield from _outdated_templates(store / TEMPLATES)
    yield from sorted(folder for folder in builds.rglob(f"{SCRATCH}*") if folder.is_dir())


def current_templates() -> set[str]:
    """Names of the folders in which the present tools keep templates, one for each model family."""
    return {digest(fingerprint.tools(STEPS["convert"], family)) for family in supported()}


def _outdated_templates(folder: Path) -> Iterator[Path]:
    """What other tools left among the templates."""
    current = current_templates()
    yield from (path for path in sorted(folder.iterdir() if folder.is_dir() else ()) if path.name not in current)


def collect(builds: Path, dry: bool = False) -> Collected:
    """Removes garbage from `builds`/.store. No build may be running: the caller holds the locks of both."""
    entries = freed = 0
    for path in garbage(builds):
        files = [path] if path.is_symlink() else [path, *path.rglob("*")]
        states = [file.lstat() for file in files]
        freed += sum(s.st_size for s in states if stat.S_ISREG(s.st_mode) and s.st_nlink == 1)
        entries += 1
        if not dry:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return Collected(entries, freed)
