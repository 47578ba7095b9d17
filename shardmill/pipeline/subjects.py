"""The files of a finished build that model.json names: the subjects of the attestations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.pipeline.task import SOURCE
from shardmill.runtime.manifest import entries


def subjects(model: Mapping[str, Any], manifest: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, sha256) of model.json and of every file it names."""
    yield manifest.name, hash_file(manifest)
    for entry in entries(model):
        if "sha256" not in entry and "files" not in entry:
            raise ShardmillError(f"{manifest}: no sha256 of {entry['path']}; delete it and build again")
        yield from named_files(entry)


def named_files(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, sha256) of every file that an entry of model.json names."""
    if "sha256" in entry:
        yield entry["path"], entry["sha256"]
    for name, sha in entry.get("files", {}).items():
        yield f"{entry['path']}/{name}", sha


def check_files(model: Mapping[str, Any], build: Path) -> None:
    """Raise ShardmillError where a file is not the one that a manifest's content names."""
    for entry in entries(model):
        for name, sha in named_files(entry):
            if not (build / name).is_file() or hash_file(build / name) != sha:
                made = f"{SOURCE}.receipt.json" if name.startswith(f"{SOURCE}/") else entry["path"]
                what = "not the file that was made and judged"
                raise ShardmillError(f"{build / name}: {what}; remove {build / made} and build again")
