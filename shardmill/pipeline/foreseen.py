"""What the store that machines share would bring for an entry, without bringing it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardmill.checkpoint.hashing import tree_digest
from shardmill.pipeline import remote
from shardmill.pipeline.entry import stored
from shardmill.pipeline.remote import Refused, Remote


def foreseen(shared: Remote, key: str, outputs: Mapping[str, Path]) -> dict[str, dict[str, Any]] | None:
    """What an entry here would record of a step's outputs once they were brought; None where there is no such entry.

    JSON files are brought, as other steps may be described by what they say. In place of any other output an empty
    file is written, so that it counts as known.

    Args:
        shared: the store.
        key: the entry's.
        outputs: of the step: where they are to lie, by name.

    Raises:
        Refused: what lies there is damaged, or another's.
    """
    files = remote.find(shared, key)
    if files is None:
        return None
    names = {path: stored(name, path) for name, path in outputs.items()}
    hashes = {path: file.sha256 for path, file in files.items()}
    recorded = {name: _described(names[path], hashes) for name, path in outputs.items()}
    with TemporaryDirectory(prefix="shardmill-why-") as folder:
        small = {file: Path(folder) / file for file in names.values() if file in files and file.endswith(".json")}
        remote.bring(shared, {file: files[file] for file in small}, small, Path(folder))
        for path, file in names.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if file in small:
                shutil.copyfile(small[file], path)
            else:
                path.touch()
    return recorded


def _described(file: str, files: Mapping[str, str]) -> dict[str, Any]:
    """What is recorded of an output.

    Args:
        file: its name in the entry.
        files: the sha256 of every output's files.
    """
    inside = {path.removeprefix(f"{file}/"): sha for path, sha in files.items() if path.startswith(f"{file}/")}
    if not inside and file not in files:
        raise Refused(f"{file} is not in it")
    return {"sha256": files.get(file) or tree_digest(inside), "file": file, "files": inside}
