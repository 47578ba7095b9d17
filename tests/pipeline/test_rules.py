"""The rules, as Snakemake reads them: their steps take what they give, gates are waited for, none is out of order."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from snakemake.iocontainers import Wildcards
from snakemake.linting.rules import RuleLinter
from snakemake.linting.snakefiles import SnakefileLinter

from shardmill import config
from shardmill.files import write_json
from shardmill.pipeline import scheduling, storage, why
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import BESIDE, WAITS
from shardmill.pipeline.needs import STEPS, Step
from shardmill.pipeline.planned import Job, planned
from shardmill.pipeline.resources import Need
from shardmill.pipeline.task import Action, Artifact, Task, Tools
from shardmill.records import finished
from shardmill.runtime.judged import GATES
from shardmill.witness import installed

from . import workflows

# Jobs run where Snakemake itself runs, which needs shardmill to read the Snakefile.
UNWANTED = "Specify a conda environment or container for each rule."
INHERITED = {"step", "engine_step", "aside"}  # rules without files, from which others inherit
OFFERED = {"tools", "threads", "hashes", "before_change", "templates"}  # by the job, see `job.describe`


def test_snakemake_s_linter_has_no_other_wish_than_an_environment_for_each_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `snakemake --lint` does."""
    monkeypatch.chdir(workflows.SNAKEFILE.parent)
    workflow = workflows.read(Path("configs/demo.yaml"))
    wishes, _ = RuleLinter(workflow, [rule for rule in workflow.rules if rule.name not in INHERITED]).lint(json=True)
    assert {lint["title"] for rule in wishes for lint in rule["lints"]} == {UNWANTED}
    assert SnakefileLinter(workflow, workflow.included).lint(json=True) == ([], False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a config that has a use for every step, and the files that it names."""
    root = tmp_path_factory.mktemp("rules")
    tiny.hf_config().save_pretrained(root / "checkpoint")
    (root / "checkpoint/tokenizer.json").touch()
    (root / "tasks/copying").mkdir(parents=True)
    (root / "tasks/copying/1.txt").touch()
    (root / "sample.txt").write_text(tiny.sample_text())
    (root / "calibration.txt").write_text(tiny.sample_text()[::-1])
    search = {
        "precision": "search",
        "calibration": {"text": "calibration.txt"},
        "budget": {"bits_per_weight": 6.0},
        "search": {"measured": 2},
    }
    benchmark = {"text": "sample.txt", "task_prompts": "tasks", "tasks": ["copying"]}
    content = tiny.settings(
        "checkpoint",
        parity={"text": "sample.txt"},
        benchmark=benchmark,
        convert=search,
        witness=True,
        predict=["ane"],
    )
    (root / "config.yaml").write_text(json.dumps(content))
    return root


@pytest.fixture
def settings(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> config.Config:
    """That config, in a copy of its folder."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installed, "runtime", lambda: {"runtime": "1"})
    monkeypatch.setattr(installed, "is_there", lambda: True)
    return config.parse(json.loads(Path("config.yaml").read_text()))


@pytest.fixture
def jobs(settings: config.Config) -> list[Job]:
    """The jobs of that config."""
    return planned(settings)


def paths(files: Any) -> list[str]:
    """A file, or the files of a list, by their paths in the build's folder."""
    return [str(path).removeprefix("build/tiny/") for path in (files if isinstance(files, list) else [files])]


def test_every_step_has_a_rule_and_a_job_and_its_logs_have_its_name(jobs: list[Job]) -> None:
    rules = {name: rule for name, rule in workflows.rules(Path("config.yaml")).items() if name not in INHERITED}
    assert rules.keys() - {"all", "refused"} == STEPS.keys() == {job.step.name for job in jobs}
    for name in STEPS:
        (log,) = rules[name].log
        assert Path(log).name.partition("{")[0].removesuffix(".log").rstrip("_") == name


def test_a_steps_function_takes_what_its_rule_gives(jobs: list[Job]) -> None:
    for job in jobs:
        given = {*job.inputs, *job.params} - {WAITS, BESIDE}
        assert set(inspect.signature(job.step.task).parameters) - OFFERED == given, job.step.name


def test_rules_stand_in_the_order_of_making(jobs: list[Job]) -> None:
    """So their jobs can be gone through one by one."""
    ahead = {path for job in jobs for path in paths([*job.results(Path()).values()])}
    for job in jobs:
        assert ahead & {*job.read()} == set(), job.step.name
        ahead -= {*paths([*job.results(Path()).values()])}
    assert ahead == set()


def test_model_json_waits_for_every_gate_and_all_verdicts_are_attested_and_shown(jobs: list[Job]) -> None:
    (manifest,), (provenance,), (report,) = (
        [job for job in jobs if job.step.name == name] for name in ("manifest", "provenance", "report")
    )
    gates = [job for job in jobs if "verdict" in job.outputs]
    assert {job.step.name for job in gates} == {"residency", "parity", "parity_stack", "witness"}
    assert {Path(job.outputs["verdict"]).parent.name for job in gates} == {*GATES}
    assert all((workflows.SNAKEFILE.parent / f"report/{job.step.name}.rst").is_file() for job in gates)
    assert {job.receipt for job in gates} <= {*paths(manifest.inputs[WAITS])}
    verdicts = [path for job in gates for path in paths(job.outputs["verdict"])]
    assert paths(provenance.inputs["verdicts"]) == paths(report.inputs["verdicts"]) == verdicts


def test_receipts_of_the_model_are_attested_and_the_page_shows_others_too(jobs: list[Job]) -> None:
    """Neither the model nor its attestation waits for what only the page shows."""
    (provenance,), (report,) = ([job for job in jobs if job.step.name == name] for name in ("provenance", "report"))
    receipts = {job.receipt: job.step.name for job in jobs if job.receipt and job.step.name != "benchmark"}
    shown = [*paths(report.inputs["receipts"])]
    assert sorted(shown) == sorted(receipts)
    beside = {receipts[path] for path in receipts.keys() - {*paths(provenance.inputs["receipts"])}}
    assert beside == {"original", "measured", "predicted"}


def test_what_has_a_receipt_is_waited_for_by_that(jobs: list[Job]) -> None:
    """The time of a folder, or of a file that came out the same, must not run a job again."""
    rules, waited = workflows.rules(Path("config.yaml")), 0
    for job in jobs:
        read = rules[job.step.name].expand_input(Wildcards(fromdict={"model": "tiny", "part": job.one}))[0]
        for path in (path for path in read if f"{path.rpartition('.')[0]}.receipt.json" in [*read.get(WAITS, [])]):
            assert path.is_ancient, (job.step.name, path)
            waited += 1
    assert waited > len(STEPS)


@pytest.mark.parametrize("in_storage", [False, True])
def test_where_files_lie_in_a_storage_a_rule_names_the_checkpoint_that_its_step_reads(
    in_storage: bool, settings: config.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job finds nothing there that its rule does not name. In build/, the checkpoint's record speaks for it."""
    monkeypatch.setattr(storage, "is_used", lambda workflow: in_storage)
    rules = workflows.rules(Path("config.yaml"))
    for name, step in STEPS.items():
        wildcards = Wildcards(fromdict={"model": "tiny", "part": settings.parts[0], "point": "chosen"})
        named = [*rules[name].expand_input(wildcards)[0], *rules[name].expand_output(wildcards)[0]]
        if name == "fetch" or hasattr(import_module(step.module), "source_folder"):
            assert ("build/tiny/source.tar" in named) == in_storage, name
        assert in_storage or not any("source.tar" in file for file in named)


def test_a_finished_build_has_the_verdicts_of_the_gates(jobs: list[Job], settings: config.Config) -> None:
    """As the module that whoever checks a build asks spells them."""
    model = {"parts": [{"name": name} for name in settings.parts]}
    verdicts = [path for job in jobs if "verdict" in job.outputs for path in paths(job.outputs["verdict"])]
    for witnessed in (False, True):
        expected = [path.removesuffix(".json") for path in verdicts if witnessed or not path.startswith("witness/")]
        assert sorted(finished.verdicts(model, witnessed)) == sorted(expected)


def listening(part: Path, bundle: Artifact, engine: dict[str, str], tools: Tools) -> Task:
    """A step that nobody wrote yet."""
    return Task(lambda made: write_json(made["verdict"], {}), Action("listen", {"bundle": bundle.sha256}, **tools))


LISTEN = """

use rule engine_step as listen with:
    input:
        part="build/{model}/parts/{part}.json",
        **made_by(rules.compile),
    output:
        verdict="build/{model}/listen/{part}.json",
        receipt="build/{model}/listen/{part}.receipt.json",
    log:
        "build/{model}/logs/listen_{part}.log",
    params:
        tools=TOOLS["listen"],
"""


@pytest.fixture
def listen(settings: config.Config, monkeypatch: pytest.MonkeyPatch) -> str:
    """A gate between compilation and model.json: a module, what it needs, and a rule in the folder's own workflow."""
    for name in ("Snakefile", "rules", "scripts", "report"):
        copied = workflows.SNAKEFILE.parent / name
        (shutil.copytree if copied.is_dir() else shutil.copyfile)(copied, name)
    with Path("rules/gates.smk").open("a") as gates:
        gates.write(LISTEN)
    row = Step("listen", needs=Need(123, part=1))
    monkeypatch.setitem(STEPS, "listen", row)
    monkeypatch.setitem(sys.modules, row.module, SimpleNamespace(task=listening))
    return "listen"


def test_a_new_rule_is_waited_for_listed_and_given_memory(listen: str, settings: config.Config) -> None:
    jobs = planned(settings)
    (manifest,), (provenance,), (report,) = (
        [job for job in jobs if job.step.name == name] for name in ("manifest", "provenance", "report")
    )
    assert "listen/head_0.receipt.json" in paths(manifest.inputs[WAITS])
    assert "listen/head_0.receipt.json" in paths(provenance.inputs["receipts"])
    assert "listen/head_0.json" in paths(report.inputs["verdicts"])
    assert {"name": "listen", "gate": True, "files": [f"listen/{part}.receipt.json" for part in settings.parts]} in (
        report.params["pipeline"]
    )
    unlimited = {"mem_mb": SimpleNamespace(value=None)}
    limit = SimpleNamespace(global_resources=unlimited, is_main_process=False)
    write_json(Path("build/tiny/plan.json"), PLAN)
    mem_mb = scheduling.memory(Batch({"tiny": settings}), limit)
    assert mem_mb(Wildcards(fromdict={"model": "tiny", "part": "head_0"}), ["a"], 1, listen) == 123 + 7


PLAN = {
    "architecture": {"layers": 1, "vocab": 0, "graph": {"experts": None}},
    "item_bytes": 2,
    "parts": [
        {"name": "head_0", "kind": "head", "parameters": 7_000_000, "largest_tensor": 1, "expanded": 0},
        {"name": "embedding", "kind": "embedding", "parameters": 1, "largest_tensor": 1, "expanded": 0},
    ],
}


def test_why_foresees_a_new_rule(listen: str, settings: config.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on compilation, of which nothing is known."""
    monkeypatch.setattr(why, "_source_record", lambda *_: {"files": {}})
    monkeypatch.setattr(why, "_made_in_place", lambda task, outputs: None)
    monkeypatch.setattr(why.entries, "entry_description", lambda path: {"sha256": "", "file": path.name, "files": {}})
    found = why.forecast(settings, Path("build/tiny"), Store(Path("build/.store")))
    listened = [verdict for verdict in found if verdict.step.startswith("listen/")]
    assert [v.step for v in listened] == [f"listen/{part}" for part in settings.parts]
    assert {v.status for v in listened} == {"depends"}
