"""A build whose gates have not all passed: it runs, marked, and becomes nothing that others would trust."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import encoders
import pytest
import tiny
from evidence.results import result
from models import tiny_encoders
from reciter import shardmill
from release.signed import make_keys
from typer.testing import Result

from shardmill.errors import ShardmillError
from shardmill.files import read_json, sealed, write_json
from shardmill.pipeline.ungated import PREFIX, taken_ungated
from shardmill.runtime.manifest import COMPLETE, UNGATED, read_manifest
from shardmill.serve import server
from shardmill.serve.model import Settings

from .driver import made_here
from .project import Project

MISSED = "residency layers_00_02: ineligible is 4, must be <= 0 (first: ios18.softmax a)"
OPEN = "parity head_0: not judged"
PROMPT = ("--prompt", "def ", "--max-new-tokens", 4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A build with model.json."""
    folder = tmp_path_factory.mktemp("ungated")
    project = Project(folder / "project").create(tiny.write_checkpoint(folder / "checkpoint", layers=2))
    project.configure(topology=[[0, 2]], benchmark=False, program={"reshape_frequency": "frequent"})
    return made_here(project, leave_out=("benchmark", "provenance", "report"))


@pytest.fixture
def build(finished: Project, tmp_path: Path) -> Path:
    """The same as two gates leave it, one that missed and one that has judged nothing."""
    folder = tmp_path / "tiny"
    shutil.copytree(finished.build, folder)
    (folder / "model.json").unlink()
    step = folder / "residency/layers_00_02"
    inputs = read_json(step.with_suffix(".receipt.json"))["inputs"]
    write_json(step.with_suffix(".failed.json"), {"gate": [], "missed": MISSED, "inputs": inputs})
    for path in (step.with_suffix(".json"), step.with_suffix(".receipt.json"), folder / "parity/head_0.receipt.json"):
        path.unlink()
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither a manifest in the build nor a temporary folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = sorted(build.rglob("*"))
    yield
    assert sorted(build.rglob("*")) == before and [*folder.glob(f"{PREFIX}*")] == []


def test_the_manifest_is_that_of_the_gated_build_with_a_mark(build: Path, finished: Project) -> None:
    """But for sizes of files; a runtime that does not know the mark refuses it."""
    gated = read_manifest(finished.build, COMPLETE)
    with taken_ungated(build) as folder:
        content = read_manifest(folder, COMPLETE)
        assert folder.name == build.name and not (build / "model.json").exists()
        for part in content["parts"]:
            assert (folder / part["program"]["path"]).is_dir()
    for entry in (gated["embedding"], gated["tokenizer"], gated["texts"], *gated["packages"].values()):
        del entry["bytes"]
    for part in gated["parts"]:
        del part["program"]["bytes"]
    del gated["expected"]  # nothing is promised of such a build
    assert content.pop(UNGATED) == [MISSED, OPEN]
    assert content == gated | {"uses": [*gated["uses"], UNGATED]}


def test_a_build_with_model_json_is_taken_as_it_is(finished: Project) -> None:
    with taken_ungated(finished.build) as folder:
        assert folder == finished.build
    ran = shardmill("generate", finished.build, "--ungated", "--no-check", *PROMPT, "--json")
    assert UNGATED not in json.loads(ran.stdout) and ran.stderr == ""


def test_the_margin_is_that_of_the_stack_if_it_was_judged(build: Path, finished: Project) -> None:
    stack = build / "parity/stack.json"
    content = read_json(stack) | {"margin": 0.25}
    write_json(stack, content)
    with taken_ungated(build) as folder:
        assert read_manifest(folder)["margin"] == 0.25
    inputs = read_json(stack.with_suffix(".receipt.json"))["inputs"]
    write_json(stack.with_suffix(".failed.json"), content | {"margin": 0.5, "missed": "kl", "inputs": inputs})
    stack.unlink()
    with taken_ungated(build) as folder:
        assert read_manifest(folder)["margin"] == 0.5
    stack.with_suffix(".failed.json").unlink()
    with taken_ungated(build) as folder:
        assert "margin" not in read_manifest(folder)
    stack.touch()  # as it was for the comparison at the end


LACKING = {
    "plan.json": "plan.json: not made yet",
    "compiled/head_0.receipt.json": "head_0.receipt.json: not made yet",
    "embedding.receipt.json": "embedding.receipt.json: not made yet",
}


@pytest.mark.parametrize("name", LACKING)
def test_all_programs_must_be_there(name: str, build: Path) -> None:
    (build / name).rename(build.parent / "aside")
    ran = shardmill("generate", build, "--ungated", *PROMPT)
    assert ran.exit_code == 1 and LACKING[name] in " ".join(ran.stderr.split()) and "snakemake" in ran.stderr
    (build.parent / "aside").rename(build / name)


@pytest.mark.parametrize(
    ("file", "of"), [("packages/head_0.receipt.json", "part"), ("compiled/head_0.receipt.json", "package")]
)
def test_a_program_that_is_older_than_the_plan_is_not_taken(file: str, of: str, build: Path) -> None:
    content = read_json(build / file)
    write_json(build / file, content | {"inputs": content["inputs"] | {of: "0" * 64}})
    with pytest.raises(ShardmillError, match=r"head_0.*build it anew"), taken_ungated(build):
        pass


def marked(ran: Result) -> None:
    """Both gates are named on standard error, and the command succeeded."""
    assert ran.exit_code == 0, ran.output
    assert [line.partition("tiny: ")[2] for line in ran.stderr.splitlines() if "UNGATED" in line][:2] == [MISSED, OPEN]


@pytest.mark.thorough
def test_generate_marks_its_text_and_its_json(build: Path) -> None:
    text = shardmill("generate", build, "--ungated", *PROMPT)
    marked(text)
    assert text.stdout.strip() and "[UNGATED; 4 tokens" in text.stderr
    ran = shardmill("generate", build, "--ungated", *PROMPT, "--json")
    marked(ran)
    assert json.loads(ran.stdout)[UNGATED] == [MISSED, OPEN]


@pytest.mark.thorough
def test_chat_marks_its_greeting_and_each_answer(build: Path) -> None:
    ran = shardmill("chat", build, "--ungated", "--max-new-tokens", 4, stdin="def \n")
    marked(ran)
    assert "tiny, UNGATED, on the" in ran.stdout and "[UNGATED; 4 tokens" in ran.stdout


def test_a_kit_s_variant_is_marked(build: Path, tmp_path: Path) -> None:
    ran = shardmill("device", "kit", build, "--ungated", "-o", tmp_path / "kit.zip")
    marked(ran)
    assert "tiny (UNGATED)" in ran.stdout
    with zipfile.ZipFile(tmp_path / "kit.zip") as kit:
        (variant,) = json.loads(kit.read("shardmill-kit/kit.json"))["variants"]
        assert variant["described"][UNGATED] == [MISSED, OPEN]
        assert json.loads(kit.read("shardmill-kit/variants/tiny/model.json"))[UNGATED] == [MISSED, OPEN]


def test_what_a_mac_measured_of_it_is_imported(build: Path, tmp_path: Path) -> None:
    """Evidence is about the packages, which a form that passes may share."""
    content = result()
    packages = {path.name.partition(".")[0]: read_json(path) for path in build.glob("packages/*.receipt.json")}
    content["variants"]["small"]["artifacts"] = {name: each["files"]["package"] for name, each in packages.items()}
    write_json(tmp_path / "result.json", sealed(content))
    ran = shardmill("device", "import", tmp_path / "result.json", build)
    assert ran.exit_code == 0, ran.output
    (imported,) = (build / "evidence").iterdir()
    assert imported.read_bytes() == (tmp_path / "result.json").read_bytes()
    shutil.rmtree(build / "evidence")


@pytest.mark.thorough
def test_figures_are_marked_and_lie_beside_the_build(build: Path, finished: Project) -> None:
    (build / "benchmark").mkdir()
    (build / "benchmark/speed.receipt.json").write_text("{}")  # of a build before, whose gates had passed
    few = ("--prompt-tokens", 8, "--new-tokens", 4, "--repetitions", 1, "--text", finished.folder / "text.txt")
    tasks = build.parent / "tasks/short"
    tasks.mkdir(parents=True)
    (tasks / "a.txt").write_text("def add(a, b):\n")
    more = ("--drafter", "none", "--task", "short", "--task-prompts", tasks.parent, "--prompts-per-task", 1)
    marked(shardmill("bench", build, "--ungated", *few, *more))
    assert read_json(build.parent / "tiny.speed.json")[UNGATED] == [MISSED, OPEN]
    shutil.rmtree(build / "benchmark")


def test_a_server_gets_the_marks(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Settings] = []
    monkeypatch.setattr(server, "serve", lambda load, settings, *_: started.append(settings))
    marked(shardmill("serve", build, "--ungated"))
    assert started[0].ungated == (MISSED, OPEN)


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["token-classification", "text-classification"])
def test_label_marks_its_json(task: str, build: Path, tmp_path: Path) -> None:
    """Here the manifest was copied: it is marked wherever it lies."""
    folder = encoders.build(tiny_encoders.write_tiny("bert", tmp_path / "ck", task), tmp_path / "bert", buckets=[16])
    content = read_json(folder / "model.json")
    write_json(folder / "model.json", content | {UNGATED: [OPEN], "uses": [UNGATED]})
    ran = shardmill("label", folder, "--text", "Anna", "--json")
    assert ran.exit_code == 0 and json.loads(ran.stdout)[UNGATED] == [OPEN]


@pytest.mark.parametrize("command", ["verify", "sign", "publish"])
def test_nobody_vouches_for_it(command: str, build: Path, tmp_path: Path) -> None:
    """Neither as it lies there, nor with the manifest that was made for those who run it."""
    private = make_keys(tmp_path / "keys", "signing").private
    words = {"verify": (), "sign": ("--key", private), "publish": ("nobody/tiny", "--dry-run")}[command]
    ran = shardmill(command, build, *words)
    assert ran.exit_code == 1 and "a gate failed, so there is no model.json" in " ".join(ran.stderr.split())
    with taken_ungated(build) as folder:
        shutil.copytree(folder, tmp_path / "copy/tiny")
    ran = shardmill(command, tmp_path / "copy/tiny", *words)
    assert ran.exit_code == 1 and "was taken with --ungated: its gates have not passed" in " ".join(ran.stderr.split())
