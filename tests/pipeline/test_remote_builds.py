"""Whole builds that share a remote store: what one machine built, another takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from processes import succeeded

from shardmill.pipeline.cache import remote
from shardmill.pipeline.cache.remote import Remote

from . import driver
from .bucket import SECRET, bucket
from .project import Project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket() as url:
        yield url


def test_an_empty_machine_makes_nothing(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job whose result is kept is taken; records are alike, and none has the credentials."""
    made = {}
    for name in ("first", "second"):
        root = tmp_path / name
        root.mkdir()
        monkeypatch.chdir(root)
        tiny.write_checkpoint(root / "checkpoint", layers=2)
        (root / "text.txt").write_text(tiny.sample_text())
        content = tiny.settings("checkpoint", topology=[[0, 2]], parity={"text": "text.txt", "positions": 8})
        left = (*driver.AFTER, "reference", "parity", "parity_stack", "manifest")
        made[name] = driver.run(root, content, left, Remote(f"{s3}/machines"))
    assert len(made["first"]) == 3 + 3 * 3 and made["second"] == []
    first, second = (
        {
            file.relative_to(root): file.read_bytes()
            for root in (tmp_path / name / "build/tiny",)
            for file in root.rglob("*")
            if file.is_file()
        }
        for name in made
    )
    assert first == second
    everything = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in everything if SECRET.encode() in file.read_bytes()]


@pytest.mark.pipeline
def test_snakemake_shares_what_it_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names the store for every job; one that nothing can open ends the run before the first."""
    checkpoint = tiny.write_checkpoint(tmp_path / "checkpoint", layers=2)
    target = "build/tiny/embedding.receipt.json"
    mine, theirs = (Project(tmp_path / name).create(checkpoint) for name in ("mine", "theirs"))
    monkeypatch.setenv(remote.URL, "nonsense://x")
    refused = mine.run(target)
    assert refused.returncode == 1 and not list(mine.build.rglob("*.log"))
    assert [line for line in refused.stdout.splitlines() if line.startswith(f"shardmill: {remote.URL}: ")]
    monkeypatch.setenv(remote.URL, f"file://{tmp_path}/remote")
    for project, word in ((mine, "INFO worked: not made before"), (theirs, "INFO taken from the remote store")):
        succeeded(project.run(target))
        assert [word in (project.build / f"logs/{job}.log").read_text() for job in ("split", "embedding")] == [True] * 2
    assert (mine.folder / target).read_bytes() == (theirs.folder / target).read_bytes()
