"""The step table: the rules say the same, nothing runs in circles, and whatever deals with steps takes a new row."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from snakemake.io import expand, flag
from snakemake.iocontainers import Wildcards

from shardmill import config
from shardmill.files import write_json
from shardmill.pipeline import code_digest, dag, snakefile, why
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.code_digest import OURS, normalized
from shardmill.pipeline.dag import Step
from shardmill.pipeline.resources import Need
from shardmill.pipeline.table import STEPS
from shardmill.pipeline.task import Action, Artifact, Task, Tools
from shardmill.witness import installed

from .workflows import IN_BUILD, IN_STORAGE

RULES = Path(__file__).parents[2] / "rules"
SNAKEFILE = RULES.parent / "Snakefile"
BUILD = "build/{model}/"
JOBS_OWN = {"store", "tools"}  # parameters that every rule has
Section = dict[str, Any]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> config.Config:
    """A config whose checkpoint and prompts are there."""
    monkeypatch.chdir(tmp_path)
    tiny.hf_config().save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "tasks/copying").mkdir(parents=True)
    (tmp_path / "tasks/copying/1.txt").touch()
    return config.parse(tiny.settings("checkpoint", benchmark={"task_prompts": "tasks", "tasks": ["copying"]}))


def constants(workflow: Any) -> dict[str, Any]:
    """What the Snakefile defines of what may lie in a storage."""
    found = re.findall(r"^([A-Z]+) = (sm\.(?:folder|checkpoint)\(.*\))$", SNAKEFILE.read_text(), re.MULTILINE)
    return {name: eval(text, {"sm": snakefile, "workflow": workflow}) for name, text in found}


def rules(settings: config.Config, workflow: Any = IN_BUILD) -> dict[str, dict[str, Section]]:
    """Every rule's sections as Snakemake would evaluate them: positional arguments under "", others by name."""
    batch = Batch({settings.model: settings})
    own = SimpleNamespace(model=settings.model)

    def evaluated(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: make(*given)(own)

    library = {name: getattr(snakefile, name) for name in snakefile.__all__}
    library["together"] = evaluated(lambda *given: lambda _: flat(given))
    scope = {
        "MODELS": batch,
        "OF": evaluated(snakefile.of(batch)),
        "PARTS": evaluated(snakefile.parts_of(batch)),
        "same": snakefile.alike(batch, "split")[0],
        "sm": SimpleNamespace(**library),
        "STORE": "build/.store",
        "TOOLS": {name: f"tools of {name}" for name in STEPS},
        "MB": lambda name: f"memory of {name}",
        "expand": expand,
        **constants(workflow),
        "local": lambda value: value,
        "report": lambda value, **_: value,
        "ancient": lambda value: flag(value, "ancient"),
        "workflow": SimpleNamespace(global_resources={"_cores": SimpleNamespace(value=1)}),
    }
    collect = eval("lambda *values, **named: {'': values, **named}")
    found = {}
    for file in sorted(RULES.glob("*.smk")):
        for name, body in re.findall(r"^rule (\w+):\n((?:    .*\n|\n)+)", unrolled(file), re.MULTILINE):
            sections = re.findall(r"^    (\w+):(.*\n(?:        .*\n)*)", body, re.MULTILINE)
            plain = {key: re.sub("  # .*", "", text) for key, text in sections}
            found[name] = {key: eval(f"collect({text})", scope | {"collect": collect}) for key, text in plain.items()}
    return found


def unrolled(file: Path) -> str:
    """A file of rules, in which one that stands in a loop has the name of its first."""
    text = file.read_text()
    for loop in re.findall(r"^for same in sm.alike\(MODELS, .*\n(?:    .*\n|\n)+", text, re.MULTILINE):
        (name,) = re.findall(r'sm.alike\(MODELS, "(\w+)"\)', loop)
        body = textwrap.dedent(loop.partition("\n")[2]).replace("rule:\n", f"rule {name}:\n")
        text = text.replace(loop, body)
    return text


def flat(value: Any) -> list[str]:
    """A file, or files in lists of lists."""
    return [value] if isinstance(value, str) else [path for each in value for path in flat(each)]


def paths(files: Any, settings: config.Config, step: Step) -> list[str]:
    """What a rule should name for files of the table: {part} stays where Snakemake fills it in."""
    own = {step.each: f"{{{step.each}}}"} if step.each else {}
    return [BUILD + path for path in dag.expanded(files, dag.names(settings), own)]


def test_every_rule_is_a_row(settings: config.Config) -> None:
    assert sorted(rules(settings)) == sorted(STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_a_rule_reads_what_its_row_says(name: str, settings: config.Config) -> None:
    step, rule = STEPS[name], rules(settings)[name]["input"]
    named = {key: flat(value) for key, value in rule.items() if key and (key != dag.WAITS or flat(value))}
    named.pop(dag.BESIDE, None)
    steps = {**dag.wanted(STEPS, settings), name: step}
    expected = {key: paths(files, settings, step) for key, files in dag.step_inputs(steps, name).items()}
    expected |= {key: flat(files(settings)) for key, files in step.outside.items()}
    waits = paths(dag.waits(steps, name), settings, step)
    if waits:
        expected[dag.WAITS] = waits
    assert named == expected


def test_the_rule_of_the_report_waits_for_no_benchmark_that_the_config_leaves_out(settings: config.Config) -> None:
    batch = Batch({settings.model: replace(settings, benchmark=False)})
    waits = re.search(r"speed=(OF\(.*\)),", (RULES / "outcome.smk").read_text().partition("\nrule report:")[2])
    assert waits and eval(waits[1], {"OF": snakefile.of(batch), "sm": snakefile})(SimpleNamespace(model="tiny")) == []


@pytest.mark.parametrize("name", STEPS)
def test_what_has_a_receipt_is_waited_for_by_that(name: str, settings: config.Config) -> None:
    """The time of a folder, or of a file that came out the same, must not run a job again."""
    rule = rules(settings)[name]["input"]
    for key in STEPS[name].takes:
        assert all("ancient" in getattr(path, "flags", {}) for path in tree(rule[key])), key


def tree(value: Any) -> Iterator[Any]:
    """The leaves of lists of lists, with their flags."""
    if isinstance(value, list):
        for each in value:
            yield from tree(each)
    else:
        yield value


@pytest.mark.parametrize("name", STEPS)
def test_a_rule_makes_what_its_row_says(name: str, settings: config.Config) -> None:
    step, rule = STEPS[name], rules(settings)[name]["output"]
    expected = {key: paths(files, settings, step) for key, files in step.makes.items()}
    if step.receipt:
        expected["receipt"] = [BUILD + step.receipt]
    assert {key: flat(value) for key, value in rule.items() if key and key != dag.BESIDE} == expected


@pytest.mark.parametrize("name", STEPS)
def test_where_files_lie_in_a_storage_a_rule_names_the_checkpoint_that_its_step_reads(
    name: str, settings: config.Config
) -> None:
    """A job finds nothing there that its rule does not name. In build/, the checkpoint's record speaks for it."""
    module = sys.modules[STEPS[name].task.__module__]
    there, here = (rules(settings, workflow)[name] for workflow in (IN_STORAGE, IN_BUILD))
    files = flat(there["output" if name == "fetch" else "input"].get(dag.BESIDE, []))
    if name == "fetch" or hasattr(module, "source_folder"):
        assert files == ["build/{model}/source.tar"]
    assert not any("source.tar" in path for path in flat([*here["input"].values(), *here["output"].values()]))


@pytest.mark.parametrize("name", STEPS)
def test_a_rule_passes_on_what_its_row_says(name: str, settings: config.Config) -> None:
    step, rule = STEPS[name], rules(settings)[name]
    params = {key: value for key, value in rule["params"].items() if key}
    assert params.pop("store") == "build/.store"
    assert params.pop("step") == name
    assert params.pop("tools") == f"tools of {name}"
    assert params == {key: value(settings) for key, value in step.params.items()}
    assert rule["resources"]["mem_mb"] == f"memory of {name}"
    assert rule["script"][""] == ("../scripts/step.py",)
    assert step.task.__module__ == f"shardmill.pipeline.steps.{name}"


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
    reached = code_digest.closure((step.task.__module__, *step.also), "phi3")
    judges = ("table", "dag", "step", "job", "why", "snakefile", "perform", "store", "fingerprint")
    above = [f"shardmill.pipeline.{module}" for module in judges]
    assert [m for m in reached if m in above or m.startswith(("shardmill.commands", "shardmill.cli"))] == []


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
    "parity_stack": {
        "jsonschema": "checks model.json of finished builds",
        "llguidance": "answers in a grammar",
        "tokenizers": "the text, which reference reads",
    },
    "benchmark": {
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
    found = set(imported(code_digest.closure((step.task.__module__, *step.also), "phi3")))
    assert set(step.packages) & set(HARMLESS.get(name, {})) == set()
    assert {*step.packages, *HARMLESS.get(name, {})} == found


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
        listening,
        makes={"verdict": "listen/{part}.json"},
        reads={"part": "parts/{part}.json"},
        takes={"bundle": "compiled/{part}.mlmodelc"},
        needs=Need(123, part=1),
        amount="# gate file",
    )
    monkeypatch.setitem(STEPS, "listen", row)
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
    mem_mb = snakefile.mem_mb(Batch({"tiny": settings}), limit)(listen)
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
