"""Brings a checkpoint into a build folder and records what it is: `source.json`.

Weights are linked, never copied. Hard links are used if the file system allows, so that the build keeps the recorded
weights even if the checkpoint is replaced or deleted later. Otherwise symbolic links are used. Small files are copied,
because people edit them in place. `source.json` holds nothing that varies with machine, path or time:

    {"commit": "<40 hex>" | "local", "files": {name: {"sha256": ..., "size": bytes}}, "repo": "owner/name" | null}
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardmill.checkpoint.cache import HashCache, file_state
from shardmill.checkpoint.hashing import hash_files
from shardmill.checkpoint.hub import HubAccess, download
from shardmill.checkpoint.layout import text_files, weight_files
from shardmill.checkpoint.paths import RECORD_FILE, checked_file
from shardmill.errors import CheckpointError
from shardmill.files import dumps, replacing, write_json


def fetch(
    *,
    path: Path | None,
    repo: str | None,
    revision: str | None,
    dest: Path,
    cache: HashCache | None,
    access: HubAccess | None = None,
    before_change: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Fill `dest` from a local folder (`path`) or from a commit of a hub repository, and return source.json.

    `dest` appears whole or not at all, and is left alone if it already holds the same files. `before_change` is called
    before the files of `dest` are replaced.
    Raises CheckpointError if not exactly one source is given, or if the source is not a sound checkpoint.
    """
    if (path is None) == (repo is None):
        raise CheckpointError("source: give exactly one of path and repo")
    _check_replaceable(dest)
    if path is not None:
        folder, hashes = path, hash_local(path, cache)
    else:
        assert repo is not None
        folder, hashes = download(repo, revision, access or HubAccess(), cache)
    record = {
        "repo": repo,
        "commit": revision if repo else "local",
        "files": source_description(folder, hashes),
    }
    if not _is_there(dest, record, cache):
        before_change()
        _land(folder, dest, record, cache)
    return record


def source_description(folder: Path, hashes: Mapping[str, str]) -> dict[str, Any]:
    """Return source.json's `files`: the sha256 and size of each named file in `folder`."""
    return {name: {"sha256": sha, "size": file_state(folder / name).size} for name, sha in sorted(hashes.items())}


def hash_local(folder: Path, cache: HashCache | None) -> dict[str, str]:
    """Return name -> sha256 of the files that make up the checkpoint in a local folder. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; check the checkpoint's path")
    names = {file.relative_to(folder).as_posix() for file in folder.rglob("*")}
    chosen = [*text_files(names), *weight_files(folder, names, str(folder))]
    files = {name: checked_file(folder, name, ours=False) for name in chosen}
    hashes = hash_files(files.values(), cache)
    return {name: hashes[file] for name, file in files.items()}


def _check_replaceable(dest: Path) -> None:
    if dest.exists() and not (dest / RECORD_FILE).exists() and any(dest.iterdir()):
        raise CheckpointError(f"{dest}: holds files but no {RECORD_FILE}, so it is not ours to replace; remove it")


def _is_there(dest: Path, record: dict[str, Any], cache: HashCache | None) -> bool:
    try:
        if (dest / RECORD_FILE).read_text("utf-8") != dumps(record):
            return False
        hashes = hash_files([dest / name for name in record["files"]], cache)
    except (OSError, CheckpointError):
        return False
    return all(hashes[dest / name] == entry["sha256"] for name, entry in record["files"].items())


def _land(folder: Path, dest: Path, record: dict[str, Any], cache: HashCache | None) -> None:
    weights = [name for name in record["files"] if name.endswith(".safetensors")]
    before = {name: file_state(folder / name) for name in weights}
    with replacing(dest) as fresh:
        for name in record["files"]:
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            _place((folder / name).resolve(), fresh / name)
        write_json(fresh / RECORD_FILE, record)
    for name, state in before.items():  # after the last link is made: a new or removed hard link changes ctime
        if cache:
            cache.carry(state, file_state(dest / name))


def _place(original: Path, link: Path) -> None:
    if not link.name.endswith(".safetensors"):
        shutil.copyfile(original, link)
        return
    try:
        os.link(original, link)
    except OSError:  # another file system, or one without hard links
        link.symlink_to(original)
