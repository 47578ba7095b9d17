"""A build of the tiny model that nothing disturbed: the real Snakemake's work, done once in a run of all tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import shared
import tiny

from .project import Project


def undisturbed(folder: Path) -> Project:
    """A copy of it, which a test may change. The checkpoint lies in it too."""
    made = shared.once("undisturbed", _make)
    shutil.copytree(made / "project", folder, symlinks=True)
    return Project(folder, hash_seed=1)


def _make(folder: Path) -> None:
    checkpoint = tiny.write_checkpoint(folder / "checkpoint", layers=2)
    Project(folder / "project", hash_seed=1).create(checkpoint).finish()
