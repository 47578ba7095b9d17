"""Garbage collection: store entries that no build refers to, templates of other tools, leftovers of killed runs."""

from __future__ import annotations

import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardmill.errors import ShardmillError, UnreadableError
from shardmill.files import SCRATCH, digest, is_left_by_macos, read_json
from shardmill.models import FOLDERS, supported
from shardmill.pipeline import code_digest
from shardmill.pipeline.cache import entry
from shardmill.pipeline.cache.entry import PREFIX
from shardmill.pipeline.cache.store import TEMPLATES, TRAINING
from shardmill.pipeline.needs import STEPS
from shardmill.records.names import RECEIPT

USERS = "users"  # the folder in which older versions noted the checkouts that share a store


@dataclass(frozen=True)
class Collected:
    """Counts of the entries and bytes that were removed, or that would be."""

    entries: int
    bytes: int  # of files that no build links to; removing other files frees nothing


def _referenced(builds: Path) -> set[str]:
    """Return the cache keys in the receipts of every build under `builds`."""
    models = [folder for folder in builds.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    return {_action_key(path) for model in models for path in _receipts(model)}


def _receipts(model: Path) -> Iterator[Path]:
    """Yield the receipts in a build. Raises ShardmillError if a folder can't be read."""
    seen = {os.path.realpath(model)}  # links are followed, but not in circles
    for folder, folders, files in os.walk(model, onerror=_refuse, followlinks=True):
        places = {name: os.path.realpath(Path(folder, name)) for name in folders}
        folders[:] = [name for name, place in places.items() if place not in seen]
        seen.update(places.values())
        yield from (Path(folder, file) for file in files if file.endswith(RECEIPT) and not is_left_by_macos(file))


def _refuse(error: OSError) -> None:
    raise ShardmillError(
        f"{error.filename}: {error.strerror}; what is built there may be in use, so nothing is removed"
    )


def _action_key(receipt: Path) -> str:
    """Return the key that a receipt names; "" if its step has no key.

    Raises ShardmillError for a damaged receipt.

    It is not known which entry a damaged receipt refers to, so nothing may be removed while such a receipt exists.
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
    """Yield parts of the store that no build refers to, and scratch folders that killed runs left here."""
    store = builds / ".store"
    _refuse_sharing(store)
    keep = _referenced(builds)
    entries = [
        folder
        for folder in sorted(store.iterdir() if store.is_dir() else ())
        if folder.is_dir() and folder.name not in keep and _is_entry(folder)
    ]
    yield from entries
    yield from entry.unused(store, [file for folder in entries for file in folder.rglob("*") if file.is_file()])
    yield from _outdated_templates(store / TEMPLATES)
    yield from sorted((store / TRAINING).glob("*"))
    yield from sorted(folder for folder in builds.rglob(f"{SCRATCH}*") if folder.is_dir())


def _refuse_sharing(store: Path) -> None:
    """Raise ShardmillError for a store that several checkouts shared by a link, as older versions allowed."""
    notes = list((store / USERS).glob("*"))
    if len(notes) > 1:
        raise ShardmillError(
            f"{store}: several folders of builds have shared it by a link; give each its own store, and share results "
            f"as docs/sharing.md says; then remove {store / USERS} and collect again"
        )


def _is_entry(folder: Path) -> bool:
    """Return whether a folder of the store holds a result, or did before its process was killed."""
    return (folder / "entry.json").is_file() or folder.name.startswith(PREFIX)


def current_templates() -> set[str]:
    """Return the folders in which the present tools keep templates, one for each model family."""
    families = {name for kind in FOLDERS for name in supported(kind)}
    return {digest(code_digest.tools(STEPS["convert"], family)) for family in families}


def _outdated_templates(folder: Path) -> Iterator[Path]:
    """Yield templates of other tools."""
    current = current_templates()
    yield from (path for path in sorted(folder.iterdir() if folder.is_dir() else ()) if path.name not in current)


def collect(builds: Path, dry: bool = False) -> Collected:
    """Remove garbage from `builds`/.store. No build may be running: the caller holds the lock of `builds`."""
    paths = list(garbage(builds))
    files = [file for path in paths for file in ([path] if path.is_symlink() else [path, *path.rglob("*")])]
    states = [state for file in files if stat.S_ISREG((state := file.lstat()).st_mode)]
    links = Counter(state.st_ino for state in states)
    freed = {state.st_ino: state.st_size for state in states if state.st_nlink <= links[state.st_ino]}
    for path in () if dry else paths:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    entries = sum(path.parent.name != entry.FOLDER for path in paths)
    return Collected(entries, sum(freed.values()))
