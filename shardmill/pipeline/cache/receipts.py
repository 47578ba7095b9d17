"""In which ingredients of their keys two actions differ, so that a log can say why there is work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import read_json, sealed, write_json
from shardmill.pipeline.task import Action, paths_from


def key_differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return dotted names of the leaves in which two actions differ."""
    found = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += key_differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name}")
    return found


def write_receipt(
    receipt: Path, action: Action, made: Mapping[str, Any], outputs: Mapping[str, Path], notes: Mapping[str, Any]
) -> None:
    """Write a receipt, which records the inputs and the outputs of a job.

    Args:
        receipt: the file to write.
        action: the work and all that decides its result.
        made: the record of each output.
        outputs: the path of each output.
        notes: further entries of the receipt.
    """
    hashes = {
        "outputs": {name: one["sha256"] for name, one in made.items()},
        "files": {name: one["files"] for name, one in made.items() if one["files"]},
        "paths": paths_from(receipt, outputs),
    }
    write_json(receipt, sealed({**asdict(action), "key": action.key, **hashes, **notes}))


def check_artifacts(receipts: Mapping[Path, Path]) -> None:
    """Raise ShardmillError if an artifact differs from its receipt.

    Otherwise results made from the damaged artifact would be stored under the key of the sound one.
    """
    for artifact, receipt in receipts.items():
        made = read_receipt(receipt)
        ((name, sha),) = made["outputs"].items()
        files = {artifact / file: inner for file, inner in made["files"].get(name, {}).items()} or {artifact: sha}
        if any(not file.is_file() or hash_file(file) != expected for file, expected in files.items()):
            raise ShardmillError(f"{artifact}: not the bytes that were made; remove it and build again")


def read_receipt(path: Path) -> dict[str, Any]:
    """Return a receipt's content."""
    content: dict[str, Any] = read_json(path)
    return content
