"""A build of the tiny model that nothing disturbed: the real Snakemake's work, done once in a run of all tests."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import shared
import tiny

from shardmill.machine import CODE
from shardmill.pipeline.needs import STEPS

from .project import Project


def undisturbed(folder: Path) -> Project:
    """A copy of it, which a test may change. The checkpoint lies in it too."""
    made = shared.once("undisturbed", _make)
    shutil.copytree(made / "project", folder, symlinks=True)
    return Project(folder, hash_seed=1)


def _make(folder: Path) -> None:
    checkpoint = tiny.write_checkpoint(folder / "checkpoint", layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # each job's log says what Python imported
        Project(folder / "project", hash_seed=1).create(checkpoint).finish()


def imported(project: Project) -> dict[str, set[str]]:
    """Return our modules that Python imported while a step's jobs were at work, by the step's name."""
    found: dict[str, set[str]] = {}
    steps = sorted(STEPS, key=len, reverse=True)
    for log in (project.build / "logs").glob("*.log"):
        step = next(name for name in steps if f"{log.stem}_".startswith(f"{name}_"))
        names = re.findall(rf"^import time:.*\| +((?:{'|'.join(CODE)})\S*)$", log.read_text(), re.MULTILINE)
        found.setdefault(step, set()).update(names)
    return found
