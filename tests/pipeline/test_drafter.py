"""A build with any trained drafter, by the workflow: its files, report and kit, and the commands that use it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import assistants
import heads
import mtp_layers
import pytest
import tiny
from processes import succeeded

from shardmill.models.interface import DRAFT_PARTS
from shardmill.runtime.manifest import read_manifest

from .project import CONFIG, Project
from .proof import faults

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["eagle3", "assistant", "mtp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def project(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("drafter")
    form: dict[str, Any] = {"topology": [[0, 2], [2, 4]]}
    if kind == "assistant":
        form = {"topology": "auto", "program": {"state": "host"}}
        checkpoint = assistants.write(assistants.target(vocab=256), folder / "checkpoint")
        tiny.train_tokenizer().save(str(checkpoint / "tokenizer.json"))
        made = Project(folder / "project").create(checkpoint)
        assistants.write(assistants.assistant(vocab_size=256), made.folder / "head")
    elif kind == "mtp":
        model = mtp_layers.target("qwen3_5")  # as it is published, with its vision tower
        checkpoint = mtp_layers.write(model, mtp_layers.drawn(model), folder / "checkpoint")
        made = Project(folder / "project").create(checkpoint)
        form = {"topology": "auto", "head": {"draft_vocab_size": 128}}
    else:
        made = Project(folder / "project").create(tiny.write_checkpoint(folder / "checkpoint"))
        heads.write_head(made.folder / "head")
    (made.folder / "prompt.txt").write_text(tiny.sample_text()[:60])
    drafter = "mtp" if kind == "mtp" else {"path": "head"}
    made.configure(drafter=drafter, benchmark={**CONFIG["benchmark"], "drafters": ["ngram"]}, **form)
    done = made.run("all")
    succeeded(done)
    return made


def shardmill(project: Project, *words: str) -> str:
    command = [sys.executable, "-c", "from shardmill.cli import main; main()", *words]
    done = subprocess.run(
        command, cwd=project.folder, env=project.environment(), capture_output=True, text=True, check=False
    )
    succeeded(done)
    return done.stdout


def test_the_manifest_names_the_drafter(project: Project, kind: str) -> None:
    manifest = read_manifest(project.build)
    assert [part["name"] for part in manifest["parts"] if part.get("drafter")] == [*DRAFT_PARTS]
    verdict = json.loads((project.build / "parity/stack.json").read_text())["gate"]
    assert {"drafts_agreement", "drafts_agreement_fp16"} <= {row["name"] for row in verdict}
    assert "drafter" in manifest["uses"] and manifest["drafter"]["kind"] == kind
    assert set(DRAFT_PARTS) < manifest["packages"].keys()
    materials = (project.build / "provenance.json").read_text()
    assert ("source/drafter/model.safetensors" in materials) == (kind != "mtp")
    assert "draft_layers" in (project.build / "report.html").read_text()
    speed = json.loads((project.build / "benchmark/speed.json").read_text())
    assert {row["drafter"] for row in speed["sweep"]} == {"ngram", kind}


def test_a_text_is_the_same_with_it(project: Project, kind: str) -> None:
    given = ("build/tiny", "--prompt-file", "prompt.txt", "--max-new-tokens", "24", "--json")
    said = [
        json.loads(shardmill(project, "generate", *given, "--drafter", name, "--policy", "always"))
        for name in ("none", kind)
    ]
    assert said[0]["tokens"] == said[1]["tokens"] and sum(said[1]["drafted"]) > 30


def test_the_next_build_has_nothing_to_do(project: Project) -> None:
    assert "0 of" in project.why()


def test_a_kit_holds_its_programs(project: Project, tmp_path: Path) -> None:
    assert faults(project.build) == []
    shardmill(project, "device", "kit", "build/tiny", "--output", str(tmp_path / "kit.zip"))
    held = zipfile.ZipFile(tmp_path / "kit.zip").namelist()
    assert all(any(name in path for path in held) for name in DRAFT_PARTS)
