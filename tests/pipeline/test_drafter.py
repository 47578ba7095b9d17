"""A build with a head, by the workflow: its files, what report and kit say of it, and the commands that use it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import heads
import pytest
import tiny

from shardmill.models.interface import DRAFT_PARTS
from shardmill.runtime.manifest import read_manifest

from .project import CONFIG, Project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("drafter")
    made = Project(folder / "project").create(tiny.write_checkpoint(folder / "checkpoint"))
    heads.write_head(made.folder / "head")
    (made.folder / "prompt.txt").write_text(tiny.sample_text()[:60])
    made.configure(
        drafter={"path": "head"}, topology=[[0, 2], [2, 4]], benchmark={**CONFIG["benchmark"], "drafters": ["ngram"]}
    )
    done = made.run("all")
    assert done.returncode == 0, done.stdout
    return made


def shardmill(project: Project, *words: str) -> str:
    command = [sys.executable, "-c", "from shardmill.cli import main; main()", *words]
    done = subprocess.run(
        command, cwd=project.folder, env=project.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_manifest_names_the_head(project: Project) -> None:
    manifest = read_manifest(project.build)
    assert [part["name"] for part in manifest["parts"] if part.get("drafter")] == [*DRAFT_PARTS]
    assert "drafter" in manifest["uses"] and manifest["drafter"]["kind"] == "eagle3"
    assert set(DRAFT_PARTS) < manifest["packages"].keys()
    materials = (project.build / "provenance.json").read_text()
    assert "source/drafter/model.safetensors" in materials
    assert "draft_layers" in (project.build / "report.html").read_text()
    speed = json.loads((project.build / "benchmark/speed.json").read_text())
    assert {row["drafter"] for row in speed["sweep"]} == {"ngram", "eagle3"}


def test_a_text_is_the_same_with_it(project: Project) -> None:
    given = ("build/tiny", "--prompt-file", "prompt.txt", "--max-new-tokens", "24", "--json")
    said = [
        json.loads(shardmill(project, "generate", *given, "--drafter", name, "--policy", "always"))
        for name in ("none", "eagle3")
    ]
    assert said[0]["tokens"] == said[1]["tokens"] and sum(said[1]["drafted"]) > 30


def test_the_next_build_has_nothing_to_do(project: Project) -> None:
    assert "0 of" in project.why()


def test_a_kit_holds_its_programs(project: Project, tmp_path: Path) -> None:
    shardmill(project, "verify", "build/tiny")
    shardmill(project, "device", "kit", "build/tiny", "--output", str(tmp_path / "kit.zip"))
    held = zipfile.ZipFile(tmp_path / "kit.zip").namelist()
    assert all(any(name in path for path in held) for name in DRAFT_PARTS)
