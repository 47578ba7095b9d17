"""The whole dialogue on a Mac whose plans keep an operation off the Neural Engine, from failed gates to an answer.

A first real Mac may well be such a one. Nobody is left without an answer, without a kit, or without the next thing to
try, and each thing that is tried is a few lines that are pasted into the config.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import yaml
from patience import BUILDING
from pipeline.project import Project, steps_that

from mac import driver

pytestmark = [driver.LINUX_ONLY, pytest.mark.pipeline, pytest.mark.slow]
SHARDMILL = "from shardmill.cli import main; main()"
LINES = re.compile(r"in the config, in place of its `(\w+)` if it has one:\n\n(.+?)\n\n", re.DOTALL)


class Mac:
    """A project on a Mac that keeps the operations `off` its Neural Engine."""

    def __init__(self, project: Project, off: str) -> None:
        self.project, self.off = project, off

    def run(self, *command: str, code: int = 0) -> str:
        """Return what a command says, which must end with the exit code."""
        ran = subprocess.run(
            [str(driver.HERE / "run"), *command],
            cwd=self.project.folder, env=self.project.environment() | {"MAC_OFF_ANE": self.off},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILDING, check=False,
        )  # fmt: skip
        assert ran.returncode == code, ran.stdout
        return ran.stdout

    def build(self, code: int = 0) -> str:
        """As `snakemake all` does: all that a build without a report needs."""
        return self.run(*self.project.command(), code=code)

    def shardmill(self, *words: str, code: int = 0) -> str:
        return self.run(sys.executable, "-c", SHARDMILL, *words, code=code)

    def paste(self, said: str) -> str:
        """Put what a failed build advises into the config; return the key."""
        (found,) = LINES.findall(said)
        key, lines = found
        (self.project.folder / "tiny.yaml").write_text(yaml.safe_dump(self.project.content() | yaml.safe_load(lines)))
        return str(key)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Two layers in a part each: 7 gates."""
    made = Project(tmp_path / "project").create(tiny.write_checkpoint(tmp_path / "checkpoint", layers=2))
    made.configure(topology=[[0, 1], [1, 2]], benchmark=False)
    yield made


def test_an_operation_that_only_flexible_shapes_keep_off_the_engine(project: Project) -> None:
    mac = Mac(project, "range:softmax")
    said = mac.build(code=1)
    for part in ("layers_00_01", "layers_01_02"):  # not only the first that failed
        assert re.search(
            rf"^  residency {part}: ineligible is \d, must be <= 0 \(first: ios18.softmax", said, re.MULTILINE
        )
    assert "build/tiny: 2 of 7 gates failed" in said
    assert (project.build / "parity/stack.json").exists() and not (project.build / "model.json").exists()

    refused = mac.shardmill("generate", "build/tiny", "--prompt", "def ", code=1)
    assert "residency layers_00_01: ineligible" in refused and "and 1 more" in refused and "--ungated" in refused
    answer = mac.shardmill("generate", "build/tiny", "--ungated", "--prompt", "def ", "--max-new-tokens", "4")
    assert "[UNGATED; 4 tokens" in answer and "coreml engine" in answer
    assert "tiny (UNGATED)" in mac.shardmill("device", "kit", "build/tiny", "--ungated", "-o", "kit.zip")
    assert "there is no model.json" in mac.shardmill("verify", "build/tiny", code=1)

    again = mac.build(code=1)
    assert steps_that("worked", again) == {"residency"}, "what passed is not judged again"

    assert mac.paste(said) == "program" and project.content()["program"] == {"shapes": "fixed"}
    mended = mac.build()
    assert "reference" not in steps_that("worked", mended) and "embedding" not in steps_that("worked", mended)
    assert not [*project.build.rglob("*.failed.json")]
    assert "[4 tokens" in mac.shardmill("generate", "build/tiny", "--prompt", "def ", "--max-new-tokens", "4")
    assert "files checked, 0 wrong" in mac.shardmill("verify", "build/tiny")


def test_an_operation_that_every_form_keeps_off_the_engine(project: Project) -> None:
    """One form after another, each a build, and at last a kit."""
    mac, tried = Mac(project, "softmax"), []
    project.configure(topology=[[0, 2]], benchmark=False, head={"slices": 1})
    for _ in range(3):
        tried.append(mac.paste(mac.build(code=1)))
    assert tried == ["program", "program", "topology"]
    content = project.content()
    assert content["program"] == {"shapes": "fixed", "state": "host"} and content["topology"] == [[0, 1], [1, 2]]
    said = mac.build(code=1)
    assert "No other is left. A kit finds out more: shardmill device kit build/tiny --ungated" in said
    assert "2 of 7 gates failed" in said  # nothing is said of the part that is gone
    answer = mac.shardmill("generate", "build/tiny", "--ungated", "--prompt", "def ", "--max-new-tokens", "4")
    assert "[UNGATED; 4 tokens" in answer


def test_silu_has_another_spelling(project: Project) -> None:
    mac = Mac(project, "silu")
    project.configure(topology=[[0, 2]], benchmark=False)
    assert mac.paste(mac.build(code=1)) == "program" and project.content()["program"] == {"silu": "tanh"}
    mac.build()


def test_a_program_that_does_not_load(project: Project) -> None:
    """Its gates judge nothing, and the next form is named all the same."""
    mac = Mac(project, "")
    project.configure(topology=[[0, 2]], benchmark=False)
    found = mac.run("env", "MAC_FAIL_LOAD=layers_00_02", *project.command(), code=1)
    assert re.search(r"^  parity layers_00_02: .*layers_00_02.mlmodelc can't be loaded", found, re.MULTILINE)
    assert "2 of 5 gates failed" in found and mac.paste(found) == "program"
    assert project.content()["program"] == {"shapes": "fixed"}
