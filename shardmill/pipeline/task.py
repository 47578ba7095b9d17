"""The description of one job of a step: the work, and all that decides its result.

A step only describes. Other modules decide whether the work is done (`perform`, `why`), so a step's code contains
nothing about that decision.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardmill.files import digest
from shardmill.records.names import SOURCE

Tools = Mapping[str, Any]  # "code" and "packages" of an action, see `code_digest.tools`
Work = Callable[[Mapping[str, Path]], None]


@dataclass(frozen=True)
class Artifact:
    """An output of another step, as that step's receipt describes it.

    Attributes:
        path: the file or the folder.
        sha256: the hash of the file, or of the folder as a tree.
        files: the sha256 of each file in a folder, by relative path; empty for a file.
    """

    path: Path
    sha256: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Action:
    """One piece of work and all that decides its result."""

    step: str
    inputs: Mapping[str, str] = field(default_factory=dict)  # name -> content hash
    params: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the action's name in the store."""
        return digest(asdict(self))


@dataclass(frozen=True)
class Task:
    """One job.

    Attributes:
        work: gets a path to write to for each output, by name.
        action: all that decides the result, so that it may be kept; None if the work is too quick for the store.
        notes: further entries of the receipt (the engine, for example).
    """

    work: Work
    action: Action | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def source_folder(record: Path) -> Path:
    """Return where the checkpoint's files lie, given source.receipt.json.

    The receipt stands beside the folder, not in it: Snakemake removes a job's outputs before it runs, and the folder
    must not lose its source.json by that.
    """
    return record.parent / SOURCE


def paths_from(receipt: Path, outputs: Mapping[str, Path]) -> dict[str, str]:
    """Return where outputs lie as seen from their receipt."""
    return {name: Path(os.path.relpath(path, receipt.parent)).as_posix() for name, path in outputs.items()}
