"""Brings a checkpoint into a build folder and records what it is: `source.json`.

Weights are linked, never copied. Hard links are used if the file system allows, so that the build keeps the recorded
weights even if the checkpoint is replaced or deleted later. Otherwise symbolic links are used. Small files are copied,
because people edit them in place. `source.json` holds nothing that varies with machine, path or time:

    {"commit": "<40 hex>" | "local", "files": {name: {"sha256": ..., "size": bytes}}, "repo": "owner/name" | null}

If a LoRA adapter is merged into the weights, the weight files that it changes are copies, and `files` describes these.
`adapter` then has the sha256 of the adapter's files, and of the weight files as they were: {"files", "base"}.

If files beside tokenizer.json name tokens that it lacks, it is written anew with them, so that every reader of the
build makes the same tokens. `completed` then has the sha256 and size of tokenizer.json as it was.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill.checkpoint.cache import HashCache, file_state
from shardmill.checkpoint.hashing import hash_file, hash_files
from shardmill.checkpoint.headers import TensorInfo, read_tensors
from shardmill.checkpoint.hub import download
from shardmill.checkpoint.hub_listing import HubAccess
from shardmill.checkpoint.layout import text_files, weight_files
from shardmill.checkpoint.merging import merge, merged_places
from shardmill.checkpoint.paths import RECORD_FILE, Row, checked_file
from shardmill.checkpoint.peft import CONFIG, WEIGHTS, LoraHeader, read_lora
from shardmill.checkpoint.tokenizer import SETTINGS, SPLIT, TOKENIZER, completed, splits_special_tokens
from shardmill.errors import CheckpointError
from shardmill.files import dumps, parse_json, replacing, write_json, write_text


def fetch(
    *,
    path: Path | None,
    repo: str | None,
    revision: str | None,
    dest: Path,
    cache: HashCache | None,
    access: HubAccess | None = None,
    before_change: Callable[[], None] = lambda: None,
    adapter: Path | None = None,
    locked: Sequence[Row] | None = None,
) -> dict[str, Any]:
    """Fill `dest` from a local folder (`path`) or from a commit of a hub repository, and return source.json.

    `dest` appears whole or not at all, and is left alone if it already holds the same files. `before_change` is called
    before the files of `dest` are replaced by others. `adapter` is the folder of a LoRA adapter to merge into the
    weights. They are merged in every call, since other code, or another version of torch, may give other weights.
    `locked` is what a lock says that the hub lists at the commit.

    Raises CheckpointError if not exactly one source is given, or if the source is not a sound checkpoint.
    """
    if (path is None) == (repo is None):
        raise CheckpointError("source: give exactly one of path and repo")
    _check_replaceable(dest)
    if path is not None:
        folder, hashes = path, hash_local(path, cache)
    else:
        assert repo is not None
        folder, hashes = download(repo, revision, access or HubAccess(), cache, locked)
    record: dict[str, Any] = {
        "repo": repo,
        "commit": revision if repo else "local",
        "files": source_description(folder, hashes),
    }
    tokenizer = _completed_tokenizer(folder) if TOKENIZER in record["files"] else None
    if tokenizer is not None:
        record["completed"] = {TOKENIZER: record["files"][TOKENIZER]}
        written = tokenizer.encode()
        record["files"][TOKENIZER] = {"sha256": hashlib.sha256(written).hexdigest(), "size": len(written)}
    lora = None if adapter is None else read_lora(adapter)
    places = merged_places(lora, read_tensors(folder)) if lora else {}
    record |= _adapter_record(lora, places, record["files"]) if lora else {}
    present = _record_there(dest, record, cache)
    if present is not None and lora is None:
        return present
    changed = {info.file for info in places.values()}
    linked = {name for name in record["files"] if name.endswith(".safetensors")} - changed
    before = {name: file_state(folder / name) for name in linked}
    with replacing(dest) as fresh:
        for name in record["files"]:
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            _place((folder / name).resolve(), fresh / name, linked=name in linked)
        if tokenizer is not None:
            write_text(fresh / TOKENIZER, tokenizer)
        if lora is not None:
            merge(lora, places, fresh)
            hashes = {name: hash_file(fresh / name) for name in changed}
            record["files"] |= source_description(fresh, hashes)
        write_json(fresh / RECORD_FILE, record)
        if record != present:
            before_change()
    for name, state in before.items():  # after the last link is made: a new or removed hard link changes ctime
        if cache:
            cache.carry(state, file_state(dest / name))
    return record


def _adapter_record(
    lora: LoraHeader, places: Mapping[str, TensorInfo], files: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return source.json's `adapter`.

    Args:
        lora: the adapter that is merged.
        places: the places of the weights that it changes.
        files: the checkpoint's files before they change, as in source.json.
    """
    changed = sorted({info.file for info in places.values()})
    return {"adapter": {"base": {n: files[n]["sha256"] for n in changed}, "files": adapter_hashes(lora.folder)}}


def _completed_tokenizer(folder: Path) -> str | None:
    """Return the text of tokenizer.json with the tokens that it lacks; None if it lacks none.

    Raises CheckpointError, see `completed`, and for a setting that no tokenizer.json can hold.
    """
    if splits_special_tokens(folder):
        raise CheckpointError(
            f"{folder / SETTINGS}: {SPLIT} is true, so a text's special tokens, a chat's marks too, are spelled letter "
            f"by letter; {TOKENIZER}, which a build's readers take, can't say that; remove the setting"
        )
    return completed(folder / TOKENIZER)


def adapter_hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of an adapter's files in PEFT's layout, by name. Raises CheckpointError if one is missing."""
    return {name: hash_file(checked_file(folder, name, ours=False)) for name in (CONFIG, WEIGHTS)}


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


def _record_there(dest: Path, record: dict[str, Any], cache: HashCache | None) -> dict[str, Any] | None:
    """Return source.json if `dest` holds what `record` describes before a merge; None if it does not."""
    try:
        text = (dest / RECORD_FILE).read_text("utf-8")
        present: dict[str, Any] = parse_json(text)
        if dumps(unmerged(present)) != dumps(unmerged(record)) or text != dumps(present):
            return None
        hashes = hash_files([dest / name for name in present["files"]], cache)
        same = all(hashes[dest / name] == entry["sha256"] for name, entry in present["files"].items())
    except (OSError, CheckpointError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return present if same else None


def unmerged(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a source.json whose merged files have the hashes that they had before."""
    base = record["adapter"]["base"] if "adapter" in record else {}
    files = {name: entry | ({"sha256": base[name]} if name in base else {}) for name, entry in record["files"].items()}
    return {**record, "files": files}


def as_fetched(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sha256 and size of each file of a source.json before a merge, and before tokens were added."""
    return {**unmerged(record)["files"], **record.get("completed", {})}


def _place(original: Path, link: Path, *, linked: bool) -> None:
    if not linked:
        shutil.copyfile(original, link)
        return
    try:
        os.link(original, link)
    except OSError:  # another file system, or one without hard links
        link.symlink_to(original)
