"""The step table: the rules say the same, nothing runs in circles, and whatever deals with steps takes a new row."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from snakemake.iocontainers import Wildcards

from shardmill import config
from shardmill.files import write_json
from shardmill.pipeline import code_digest, dag, scheduling, snakefile, storage, why
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.code_digest import OURS, normalized
from shardmill.pipeline.dag import Step
from shardmill.pipeline.resources import Need
from shardmill.pipeline.table import STEPS
from shardmill.pipeline.task import Action, Artifact, Task, Tools
from shardmill.records import finished
from shardmill.witness import installed

from . import workflows
from .workflows import IN_BUILD

BUILD = "build/tiny/"
WITHOUT_A_STEP = {"all", "refused"}
Rules = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """A job of a rule: its files and parameters by name, as Snakemake gives them."""

    rule: Any
    input: Mapping[str, Any]
    output: Mapping[str, Any]
    params: Mapping[str, Any]


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
    return config.parse(json.loads(Path("config.yaml").read_text()))


@pytest.fixture(scope="module")
def rules(folder: Path) -> Rules:
    """The rules of a build in build/."""
    return read_rules(folder, in_storage=False)


@pytest.fixture(scope="module")
def rules_in_storage(folder: Path) -> Rules:
    """The rules of a build whose files lie in a storage."""
    return read_rules(folder, in_storage=True)


def read_rules(folder: Path, in_storage: bool) -> Rules:
    """What Snakemake reads, with a number for a step's memory and a text for its tools."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(installed, "is_there", lambda: True)
        patch.setattr(storage, "is_used", lambda workflow: in_storage)
        patch.setattr(snakefile, "tools", lambda *_: {name: f"tools of {name}" for name in STEPS})
        patch.setattr(scheduling, "mem_mb", lambda *_: [*STEPS].index)
        return workflows.rules(Path("config.yaml"))


def job(rule: Any, config: config.Config) -> Job:
    """The first job of a rule."""
    own = {"model": "tiny", "part": config.parts[0], "point": config.points[0]}
    wildcards = Wildcards(fromdict={name: own[name] for name in ("model", *rule.wildcard_names - {"model"})})
    read, made = rule.expand_input(wildcards)[0], rule.expand_output(wildcards)[0]
    params = rule.expand_params(wildcards, read, made, None)[0]
    return Job(rule, dict(read.items()), dict(made.items()), dict(params.items()))


def flat(value: Any) -> list[Any]:
    """A file, or the files of a list."""
    return [value] if isinstance(value, str) else [*value]


def paths(files: Any, settings: config.Config, step: Step) -> list[str]:
    """What the first job of a step should name for files of the table."""
    own = {step.each: dag.names(settings)[step.each][0]} if step.each else {}
    return [BUILD + path for path in dag.expanded(files, dag.names(settings), own)]


def test_every_rule_is_a_row(rules: Rules) -> None:
    assert sorted(rules.keys() - WITHOUT_A_STEP) == sorted(STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_a_rule_reads_what_its_row_says(name: str, rules: Rules, settings: config.Config) -> None:
    step, named = STEPS[name], {key: flat(value) for key, value in job(rules[name], settings).input.items()}
    expected = {key: paths(files, settings, step) for key, files in dag.step_inputs(STEPS, name).items()}
    expected |= {key: flat(files(settings)) for key, files in step.outside.items()}
    waits = paths(dag.waits(STEPS, name), settings, step)
    if waits:
        expected[dag.WAITS] = waits
    assert {key: files for key, files in named.items() if key != dag.BESIDE} == expected


@pytest.mark.parametrize("name", STEPS)
def test_what_has_a_receipt_is_waited_for_by_that(name: str, rules: Rules, settings: config.Config) -> None:
    """The time of a folder, or of a file that came out the same, must not run a job again."""
    read = job(rules[name], settings).input
    for key in STEPS[name].takes:
        assert flat(read[key]) and all(file.is_ancient for file in flat(read[key])), key


@pytest.mark.parametrize("name", STEPS)
def test_a_rule_makes_what_its_row_says(name: str, rules: Rules, settings: config.Config) -> None:
    step, made = STEPS[name], job(rules[name], settings).output
    expected = {key: paths(files, settings, step) for key, files in step.makes.items()}
    if step.receipt:
        expected["receipt"] = paths(step.receipt, settings, step)
    assert {key: flat(value) for key, value in made.items() if key != dag.BESIDE} == expected


@pytest.mark.parametrize("name", STEPS)
def test_where_files_lie_in_a_storage_a_rule_names_the_checkpoint_that_its_step_reads(
    name: str, rules: Rules, rules_in_storage: Rules, settings: config.Config
) -> None:
    """A job finds nothing there that its rule does not name. In build/, the checkpoint's record speaks for it."""
    here, there = (beside(job(found[name], settings)) for found in (rules, rules_in_storage))
    if name == "fetch" or hasattr(import_module(STEPS[name].module), "source_folder"):
        assert "build/tiny/source.tar" in there
    assert not any("source.tar" in file for file in here)


def beside(found: Job) -> list[str]:
    """The files that a job reaches through another file."""
    return [*flat(found.input.get(dag.BESIDE, [])), *flat(found.output.get(dag.BESIDE, []))]


@pytest.mark.parametrize("name", STEPS)
def test_a_rule_passes_on_what_its_row_says(name: str, rules: Rules, settings: config.Config) -> None:
    found, wildcard = job(rules[name], settings), {"{point}": settings.points[0]}
    expected = {key: value(settings) for key, value in STEPS[name].params.items()}
    expected = {key: wildcard.get(value, value) if isinstance(value, str) else value for key, value in expected.items()}
    assert found.params == {"store": "build/.store", "step": name, "tools": f"tools of {name}"} | expected
    assert found.rule.resources["mem_mb"].value == [*STEPS].index(name)
    assert found.rule.script == "../scripts/step.py"


def test_the_report_waits_for_no_benchmark_that_the_config_leaves_out(settings: config.Config) -> None:
    assert snakefile.made_by("benchmark", settings) == ["build/{model}/benchmark/speed.json"]
    assert snakefile.made_by("benchmark", replace(settings, benchmark=False)) == []


@pytest.mark.parametrize("name", STEPS)
def test_a_steps_function_takes_what_its_row_says(name: str) -> None:

    step = STEPS[name]
    offered = {"tools", "threads", "hashes", "before_change", "templates"}
    given = {*step.reads, *step.takes, *step.outside, *step.params} - {dag.WAITS}
    assert set(inspect.signature(step.task).parameters) - offered == given


@pytest.mark.parametrize("name", STEPS)
def test_no_step_stands_on_what_stands_on_it(name: str) -> None:
    """Nor on commands, whose options and help have no part in a result."""
    step = STEPS[name]
    reached = code_digest.closure(code_digest.modules(step), "phi3")
    judges = ("table", "dag", "job", "why", "snakefile", "cache.store", "code_digest")
    above = [f"shardmill.pipeline.{module}" for module in judges]
    assert all(map(code_digest.module_file, above)), "a module of this list is not there"
    assert [m for m in reached if m in above or m.startswith(("shardmill.commands", "shardmill.cli"))] == []


def test_a_finished_build_has_the_verdicts_of_the_gates(settings: config.Config) -> None:
    """As the module that whoever checks a build asks spells them."""
    model = {"parts": [{"name": name} for name in settings.parts]}
    for witnessed in (False, True):
        steps = dag.wanted(STEPS, replace(settings, witness=witnessed))
        expected = dag.expanded(dag.verdicts(steps), dag.names(settings))
        assert sorted(finished.verdicts(model, witnessed)) == sorted(path.removesuffix(".json") for path in expected)


@pytest.mark.parametrize("name", STEPS)
def test_every_module_that_a_row_names_is_there(name: str) -> None:
    assert all(code_digest.module_file(module) for module in STEPS[name].also)


# Packages that the code of a step imports and that can't change a byte of its result.
HARMLESS = {
    "split": {
        "coremltools": "runs programs, as the two below",
        "protobuf": "see coremltools",
        "torch": "see coremltools",
        "numpy": "finds NaN and Inf",
        "pydantic": "checks settings, which are in the key as they are",
        "PyYAML": "reads config files, for commands",
    },
    "precision": {"numpy": "computes a recurrence's triangles, which have no form"},
    "compile": {
        "jsonschema": "checks model.json of finished builds",
        "numpy": "runs programs",
        "torch": "runs programs",
    },
    "parity": {
        "jsonschema": "checks model.json of finished builds",
        "tokenizers": "the text, which reference reads",
    },
    "witness": {
        "jsonschema": "checks model.json of finished builds",
        "tokenizers": "the text, which reference reads",
    },
    "predicted": {
        "jsonschema": "checks model.json of finished builds",
        "llguidance": "answers in a grammar",
        "tokenizers": "the text, which reference reads",
    },
    "parity_stack": {
        "jsonschema": "checks model.json of finished builds",
        "llguidance": "answers in a grammar",
        "tokenizers": "the text, which reference reads",
    },
    "benchmark": {
        "Jinja2": "variables of chat templates, which no benchmark sets",
        "jsonschema": "checks model.json of finished builds",
        "llguidance": "answers in a grammar",
        "prometheus_client": "counts requests",
        "PyYAML": "reads config files, for commands",
        "rich": "progress bars",
        "transformers": "config.json, which split reads",
    },
}


@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if step.kept])
def test_the_packages_that_a_step_names_are_those_that_its_code_imports(name: str) -> None:
    step = STEPS[name]
    found = set(imported(code_digest.closure(code_digest.modules(step), "phi3")))
    assert set(step.packages) & set(HARMLESS.get(name, {})) == set()
    assert {*step.packages, *HARMLESS.get(name, {})} == found


def test_keys_of_packages_and_tables_take_any_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are the same, so the keys must be. What is measured counts for the build that measured it."""
    monkeypatch.setattr(code_digest, "package_versions", lambda names: dict.fromkeys(names, "9.1+cpu"))
    found = {name: code_digest.versions(step) for name, step in STEPS.items() if "torch" in step.packages}
    short = {name for name, versions in found.items() if versions["torch"] == "9.1"}
    assert short == {"convert", "embedding"}
    rest = {version for versions in found.values() for name, version in versions.items() if name != "torch"}
    assert {versions["torch"] for name, versions in found.items() if name not in short} == rest == {"9.1+cpu"}


def imported(modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the distributions that modules import."""
    for file in modules.values():
        yield from distributions(file)


@cache
def distributions(file: Path) -> tuple[str, ...]:
    """Return the distributions that a module imports."""
    tops: set[str] = set()
    for node in ast.walk(normalized(ast.parse(file.read_text()))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        tops |= {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - set(OURS)
    tops -= installed.PACKAGES.keys()  # an extra; its versions are a parameter of the one step that runs it
    return tuple(by_package()[top][0] for top in tops)


by_package = cache(packages_distributions)


def listening(part: Path, bundle: Artifact, tools: Tools) -> Task:
    """A step that nobody wrote yet."""
    return Task(lambda made: write_json(made["verdict"], {}), Action("listen", {"bundle": bundle.sha256}, **tools))


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> str:
    """A row for it: a gate between compilation and model.json."""
    row = Step(
        "listen",
        makes={"verdict": "listen/{part}.json"},
        reads={"part": "parts/{part}.json"},
        takes={"bundle": "compiled/{part}.mlmodelc"},
        needs=Need(123, part=1),
        amount="# gate file",
    )
    monkeypatch.setitem(STEPS, "listen", row)
    monkeypatch.setitem(sys.modules, row.module, SimpleNamespace(task=listening))
    return "listen"


def test_a_new_row_is_waited_for_listed_and_given_memory(
    listen: str, settings: config.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "build/{model}/listen/head_0.receipt.json" in snakefile.gate_receipts(settings)
    assert "build/{model}/listen/head_0.json" in snakefile.verdicts(settings)
    assert "build/{model}/listen/head_0.receipt.json" in snakefile.all_receipts(settings)
    assert "listen/{part}.receipt.json" in dag.waits(STEPS, "manifest")
    assert set(snakefile.tools(Batch({}), IN_BUILD)) == set(STEPS)
    assert {"listen"} <= {row["name"] for row in dag.step_rows(STEPS, settings)}
    unlimited = {"mem_mb": SimpleNamespace(value=None)}
    limit = SimpleNamespace(global_resources=unlimited, is_main_process=False)
    write_json(Path("build/tiny/plan.json"), PLAN)
    mem_mb = scheduling.mem_mb(Batch({"tiny": settings}), limit)(listen)
    assert callable(mem_mb) and mem_mb(Wildcards(fromdict={"model": "tiny", "part": "head_0"}), ["a"]) == 123 + 7


PLAN = {
    "architecture": {"layers": 1, "vocab": 0, "graph": {"experts": None}},
    "item_bytes": 2,
    "parts": [
        {"name": "head_0", "kind": "head", "parameters": 7_000_000, "largest_tensor": 1, "expanded": 0},
        {"name": "embedding", "kind": "embedding", "parameters": 1, "largest_tensor": 1, "expanded": 0},
    ],
}


def test_why_foresees_a_new_row(listen: str, settings: config.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on compilation, of which nothing is known."""
    monkeypatch.setattr(why, "_source_record", lambda *_: {"files": {}})
    monkeypatch.setattr(why, "_made_in_place", lambda task, outputs: None)
    monkeypatch.setattr(why.entries, "entry_description", lambda path: {"sha256": "", "file": path.name, "files": {}})
    found = why.forecast(settings, Path("build/tiny"), Store(Path("build/.store")))
    listened = [verdict for verdict in found if verdict.step.startswith("listen/")]
    assert [v.step for v in listened] == [f"listen/{part}" for part in settings.parts]
    assert {v.status for v in listened} == {"depends"}


def test_the_report_counts_every_file_of_a_step() -> None:
    """The demo has eight programs and the embedding, so nine parts and nine gate files of parity."""
    root = Path(__file__).parents[2]
    settings = config.load(root / "configs/demo.yaml", root)
    rows = {row["name"]: row["count"] for row in dag.step_rows(STEPS, settings)}
    assert (rows["split"], rows["convert"], rows["compile"], rows["parity"]) == (9, 8, 8, 9)
