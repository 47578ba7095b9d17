"""A build under whatever a machine does to it: it ends with one line or goes on, and comes to the same artifacts.

`pytest tests/faults --kills 50` kills it at 50 random points instead of one in each stage.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
from pipeline.project import Project
from pipeline.undisturbed import undisturbed
from processes import succeeded
from unprivileged import unprivileged

from shardmill.records.audit import audit

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
LONGEST = 4.0  # seconds at most from a stage's begin to a kill, in which two or three of its jobs end
YEAR = 365 * 86400.0  # seconds
BEGUN: dict[str, Callable[[Path], bool]] = {
    "the start": lambda build: True,
    "split": lambda build: (build / "source.receipt.json").exists(),
    "conversion": lambda build: any((build / "packages").glob("*.receipt.json")),
    "the gates": lambda build: any((build / "logs").glob("parity_*.log")),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A build that nothing disturbed."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "project")


def fresh(finished: Project, folder: Path) -> Project:
    """Another folder with the very same library, and nothing built."""
    shutil.copytree(finished.folder, folder, ignore=shutil.ignore_patterns(".snakemake", "build"))
    return Project(folder)


def built(finished: Project, folder: Path) -> Project:
    """A copy of a finished build."""
    shutil.copytree(finished.folder, folder, symlinks=True)
    return Project(folder)


def some_time_after(begun: Callable[[Path], bool], delay: float) -> Callable[[Path], bool]:
    """Holds of a build `delay` seconds after a stage has begun, or once all have ended."""
    since: list[float] = []

    def reached(build: Path) -> bool:
        if not since and begun(build):
            since.append(time.monotonic())
        return bool(since and time.monotonic() > since[0] + delay) or (build / "model.json").exists()

    return reached


def test_killed_in_every_stage_it_comes_to_the_same(
    finished: Project, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """SIGKILL at random points, then to the end, in another folder and under another hash seed: the same receipts.

    After each SIGKILL what is recorded is whole, and as in a build that nothing disturbed.
    """
    project, drawn, truth = fresh(finished, tmp_path / "elsewhere"), random.Random(0), finished.records()
    project.hash_seed = 99
    for kill, begun in zip(range(request.config.getoption("kills")), cycle(BEGUN.values())):
        if (project.build / "model.json").exists():
            shutil.rmtree(project.folder / "build")
        project.kill_when(some_time_after(begun, drawn.uniform(0, LONGEST)))
        for file in project.build.rglob("*.json"):
            if ".snakemake" not in file.parts and not file.name.startswith("."):
                json.loads(file.read_text())  # whole, or not there
        for file in project.build.rglob("*.receipt.json"):
            name = file.relative_to(project.build).as_posix()
            assert file.read_bytes() == truth[name], f"{name} after kill {kill}"
    project.finish()
    assert project.records() == truth
    assert audit(project.build).wrong == ()


@pytest.mark.parametrize("moved", ["checkpoint", "build"])
def test_a_clock_that_went_back_changes_no_artifact(moved: str, finished: Project, tmp_path: Path) -> None:
    """Files then lie in the future. What Snakemake looks at again has the same content."""
    project = built(finished, tmp_path / "project")
    future = time.time() + YEAR
    for file in (project.folder / moved).rglob("*.json"):
        os.utime(file, (future, future))
    project.finish()
    assert project.records() == finished.records()
    assert audit(project.build).wrong == ()


@pytest.mark.parametrize("kept", ["build/tiny/parts", "build/.store"])
def test_a_folder_that_may_not_be_written_is_one_line(kept: str, finished: Project, tmp_path: Path) -> None:
    """To a user who may not do everything, as root may. Once it is allowed the same command goes on from there."""
    project = fresh(finished, tmp_path / "project")
    folder = project.folder / kept
    folder.mkdir(parents=True)
    folder.chmod(0o555)
    target = "build/tiny/embedding.receipt.json"
    done = project.run(target, under=unprivileged())
    said = [line for line in done.stdout.splitlines() if line.startswith("shardmill")]
    assert done.returncode != 0 and "Traceback" not in done.stdout, done.stdout
    assert any(kept in line and "Permission denied" in line for line in said), done.stdout
    if folder.exists():  # Snakemake removes a folder that nothing was made in
        folder.chmod(0o755)
    succeeded(project.run(target, under=unprivileged()))
    assert (project.folder / target).read_bytes() == (finished.folder / target).read_bytes()
