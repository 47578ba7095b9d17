"""No key is too narrow: what a step is given is in its key, or is named here with the reason why it need not be.

The rules say what a step is given: the jobs are those of Snakemake's own DAG. So a setting, an entry of plan.json or a
step that is new is covered: these tests fail until it is in the key, or named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import heads
import pytest
import tiny
import torch
from models import tiny_encoders
from safetensors.torch import load_file, save_file
from snakemake.iocontainers import Wildcards

from shardmill import config
from shardmill.checkpoint.cache import HashCache
from shardmill.config.model import Audio, Images
from shardmill.files import read_json, write_json
from shardmill.forms.recipe import matrices
from shardmill.models.interface import MTP
from shardmill.pipeline import options
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import describe
from shardmill.pipeline.made import has, of_steps
from shardmill.pipeline.needs import step_of
from shardmill.pipeline.planned import OF_THE_JOB, Job, jobs_of, planning
from shardmill.pipeline.steps.split import split
from shardmill.pipeline.task import Artifact
from shardmill.plan import write_part
from shardmill.witness import installed

from .otherwise import WITHOUT, Leaf, changed, leaves

MAKES = "calibration codes sensitivity original measured reference"
RUNS = "parity parity_stack witness predicted"  # programs
READS = f"{MAKES} {RUNS}"  # plan.json
WITHOUT_DRAFTER = "parity/decoder/* parity/encoder/* parity/drafter/[!d]* parity_stack/decoder/ parity_stack/encoder/"

# What need not be in a key: jobs by step, model and part; what they are given; and why.
UNREAD = (
    ("*", "record.commit record.repo", "where the files came from; their hashes count"),
    (
        f"embedding convert witness predicted {MAKES} {WITHOUT_DRAFTER}",
        "record.files record.drafter.files",
        "it leads to the files; the digests of what is read are in the part, in the plan's `source`, or in the states",
    ),
    (
        "expected",
        "record.files record.drafter.files summary.model",
        "the plan's `source` is in the key, names count not",
    ),
    (
        READS,
        "summary.model summary.kind summary.passes summary.lengths summary.weights summary.weight_file_limit "
        "summary.systems* summary.item_bytes summary.eos_token_ids summary.parts.0.parameters",
        "for the report, for runtimes, and for the memory of jobs",
    ),
    (
        "precision",
        "towers",
        "the form of a tower's matrices; the recipe, whose content counts, has those that are there",
    ),
    (
        READS,
        "summary.reach summary.pooling summary.dense summary.prompts summary.default_prompt",
        "what a runtime makes of an encoder's rows; it is the rows that are compared",
    ),
    (
        READS,
        "summary.architecture.[!el]* summary.architecture.ends summary.architecture.labels summary.prefix "
        "summary.tables summary.conv_taps",
        "follows from the checkpoint, or is in each part; the digest of one of them is in the key, or in the states'",
    ),
    (
        f"codes sensitivity original measured reference {RUNS}",
        "summary.architecture.layers",
        "follows from the checkpoint",
    ),
    (
        f"{MAKES} */decoder/* */drafter/*",
        "summary.architecture.embedding_scale",
        "of an encoder's rows",
    ),
    (
        MAKES,
        "summary.parts.0.inputs summary.drafter.* summary.tokens_max summary.verify summary.widths summary.contexts "
        "summary.window summary.window_slots summary.rope summary.band summary.causal summary.labels",
        "of programs, and of what runs them",
    ),
    ("calibration original codes sensitivity measured", "summary.buckets summary.task", "only decoders have the step"),
    ("codes sensitivity measured", "summary.context summary.parts.0.start", "in what it is given of calibration"),
    ("codes", "summary.source", "in the edges, and in the part"),
    ("original reference", "summary.parts.0.start", "layers are run one by one, whatever parts hold them"),
    (RUNS, "summary.source", "in the states, of which the key has what is compared"),
    (RUNS, "summary.context summary.tokens_max summary.parts.0.start summary.parts.0.inputs", "in the programs"),
    ("parity witness", "summary.contexts summary.widths", "in the part"),
    ("*/decoder/* */drafter/*", "summary.band summary.causal summary.labels summary.task", "of encoders"),
    ("parity/encoder/* parity_stack/encoder/", "summary.buckets", "in the programs"),
    ("parity/drafter/draft*", "summary.rope summary.window summary.window_slots", "the drafter's own count"),
    ("parity/drafter/draft*", "summary.drafter.kind summary.drafter.tokens summary.drafter.vocab", "in its checkpoint"),
    ("parity/drafter/[!d]*", "summary.drafter.*", "in the part: which layers have taps"),
    ("parity_stack/* residency", "parts.0.* part.tensors.0.sha256", "in the package"),
    ("parity_stack", "recipe", "in the packages, unless it decides the limits"),
    ("parity/decoder/head_* convert/decoder/head_*", "codes.0", "a matrix in INT8 has no codes"),
    ("*/encoder/*", "reshape", "the shapes are fixed"),
    ("embedding", "part.spec.tokens", "a table has no passes"),
    ("precision", "parts.*", "a recipe names matrices, and is the same if their names are"),
    ("precision/drafter/*", "precision", "the file that it names counts"),
    ("measured", "point", "the forms and the estimate count, not the name"),
    ("calibration reference", "settings.text parity.text", "its content counts"),
    (
        "split",
        "settings.source.* settings.drafter.* settings.program.bundles settings.program.reshape_frequency",
        "fetch has them, or the steps that compile and load programs",
    ),
    ("benchmark", "manifest.source manifest.texts", "where the weights came from, and templates that no prompt uses"),
)
# Settings that no key has.
IN_FILES = {"source", "drafter", "parity.text"}

BEHIND = {"model": "tiny", "parts": [{"program": {"files": {"a": "0"}}}], "source": {"repo": None}, "texts": {"a": 1}}
# What is unlike the usual change of a value of its kind.
LEAVES: dict[str, Any] = {"bundles": "each", "point": "chosen", "drafter": MTP, "precision": "fp16"}
LEAVES |= {"images": Images(), "audio": Audio()}
# The entries of a file that are changed one by one. Others than these have each of their entries changed.
OF_A_PART: list[Leaf] = [("tensors", 0, "sha256"), ("spec", "tokens")]
OF_A_RECORD: list[Leaf] = [("files",), ("commit",), ("repo",), ("drafter", "files")]
OF_PARTS: list[Leaf] = [("parts", 0, "start"), ("parts", 0, "inputs"), ("parts", 0, "parameters")]


@dataclass(frozen=True)
class Model:
    """A build's folder with all that the steps' descriptions read, and the config behind it."""

    name: str
    settings: config.Config
    build: Path
    workflow: Any  # Snakemake's, with the DAG
    models: dict[str, config.Config]  # the workflow's

    @cached_property
    def jobs(self) -> list[Job]:
        """Of each step whose result is kept, a job of each kind of part or point."""
        found: dict[tuple[str, str], Job] = {}
        for job in jobs_of(self.workflow, self.settings):
            if job.receipt:
                found.setdefault((job.step.name, job.one.rstrip("_0123456789")), job)
        return [*found.values()]

    def given(self, job: Job) -> dict[str, Any]:
        """What a job is given."""
        return job.arguments(self.build)

    def key(self, job: Job, given: Mapping[str, Any]) -> str:
        """The key of a job that is given this."""
        action = describe(job.step.task, given, Store(self.build.parent / "store"), {}).action
        assert action is not None
        return action.key

    def steps(self, settings: config.Config) -> set[str]:
        """The steps that the build of another config has."""
        return {step_of(rule.name) for rule in of_steps(self.workflow) if has(settings, rule)}

    def params(self, job: Job, settings: config.Config) -> dict[str, Any]:
        """The parameters that a job's rule would give it for another config."""
        name = f"{len(self.models)}"
        self.models[name] = settings  # functions of rules look for it by name, and remember what they found
        wildcards = Wildcards(fromdict={"model": name})
        (rule,) = (rule for rule in self.workflow.rules if rule.name == job.step.name)
        given = [(name, value) for name, value in rule.params.items() if name not in (*OF_THE_JOB, "point")]
        return {name: value(wildcards) for name, value in given}


def write_model(folder: Path, content: dict[str, Any], checkpoint: Path, drafter: Path | None = None) -> Model:
    """Write what fetch and split make, and what other steps' results must hold for a description."""
    settings, build = config.parse(content), folder / "build"
    source = tiny.fetched(checkpoint, build / "source")
    record = json.loads((source / "source.json").read_text())
    if drafter:
        record["drafter"] = json.loads((tiny.fetched(drafter, source / "drafter") / "source.json").read_text())
    write_json(build / "source.receipt.json", record)
    parts, plan = split(source, settings, HashCache(folder / "hashes"), record["files"])
    write_json(build / "plan.json", plan)
    for each in parts:
        write_part(build / f"parts/{each.name}.json", each)
    coded = {each.name: next(iter(matrices(each.shapes)), None) for each in parts}
    forms = {each.in_model(path): "int4" for each in parts if (path := coded[each.name]) and each.kind == "layers"}
    write_json(build / "precision.json", {"schema": 1, "default": "int8", "matrices": forms})
    estimate = {"perplexity": 1.01}
    points = dict.fromkeys(settings.points, {"forms": forms, "estimate": estimate})
    write_json(build / "search.json", {"forms": forms, "estimate": estimate, "points": points})
    states = {"tokens": torch.arange(8), "hidden": torch.rand(5, 8, 4), "logits": torch.rand(8, 16)}
    states |= {f"output_{size * times}": torch.rand(8, 4) for size in settings.sizes for times in (1, 2)}
    save_file(states, build / "reference.safetensors")
    (build / "codes").mkdir()
    for part, path in coded.items():
        save_file({f"{path}.int4.codes": torch.arange(8)}, build / f"codes/{part}.safetensors")
    write_json(build / "model.json", BEHIND)
    write_json(folder / "config.json", options.settings(settings))
    workflow = planning(folder / "config.json")
    for file in (job.receipt for job in jobs_of(workflow, settings)):
        if file:
            write_json(build / file, {"outputs": {"made": f"hash of {file}"}, "files": {}})
    return Model(folder.name, settings, build, workflow, workflow.globals["MODELS"].models)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    """Models that have every step and every kind of part among them."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "sample.txt").write_text("text")
    (folder / "calibration.txt").write_text("something else")
    (folder / "tasks/copying").mkdir(parents=True)
    (folder / "tasks/copying/1.txt").write_text("copy this")
    tasks = {"task_prompts": str(folder / "tasks"), "tasks": ["copying"]}
    texts = {"parity": {"text": f"{folder}/sample.txt"}, "benchmark": {"text": f"{folder}/sample.txt", **tasks}}
    search = {
        "precision": "search",
        "calibration": {"text": str(folder / "calibration.txt")},
        "budget": {"bits_per_weight": 6.0},
        "search": {"measured": 2, "forms": ["int4", "int8", "palette4/16"]},
    }
    recipe = folder / "recipe.json"
    write_json(recipe, {"schema": 1, "default": "int8", "matrices": {}})
    checkpoint, head = tiny.write_checkpoint(folder / "checkpoint"), heads.write_head(folder / "head")
    bert = tiny_encoders.write_tiny("bert", folder / "bert", "token-classification")
    apart = {"witness": True, "predict": ["ane"], "program": {"runs_on": ["macOS 15", "macOS 26"]}}
    drafts = {"drafter": {"path": str(head)}, "program": {"labels": ["def"]}, "convert": {"precision": str(recipe)}}
    contents: dict[str, tuple[Any, ...]] = {
        "decoder": (tiny.settings(str(checkpoint), convert=search, **apart, **texts), checkpoint),
        "drafter": (tiny.settings(str(checkpoint), **drafts, **texts), checkpoint, head),
        "encoder": (tiny_encoders.settings(bert, topology=[[0, 3]], **texts), bert),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installed, "runtime", lambda: {"runtime": "1"})
        patch.setattr(installed, "is_there", lambda: True)
        patch.chdir(folder)
        yield [write_model(folder / "builds" / name, *content) for name, content in contents.items()]


def alternatives(name: str, value: Any, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the leaves of what a job is given by their paths, each with what makes an argument in which it differs."""
    if isinstance(value, list) and value and isinstance(value[0], Path | Artifact):
        for i in {0, len(value) - 1}:
            for path, made in alternatives(f"{name}.{i}", value[i], folder):
                yield path, lambda i=i, made=made: [*value[:i], made(), *value[i + 1 :]]
    elif isinstance(value, Artifact):
        yield name, lambda: replace(value, path=other_content(value.path, folder), sha256="another")
    elif isinstance(value, Path) and value.suffix == ".json":
        content = read_json(value)
        for leaf in entries(value.name, content):
            yield ".".join(map(str, (name, *leaf))), partial(other_json, content, leaf, folder / value.name)
    elif isinstance(value, Path):
        yield name, partial(other_text, value, folder / value.name)
    elif not isinstance(value, list) or value:
        for leaf in leaves(value):
            path = (name, *leaf)
            yield ".".join(path), partial(changed, value, leaf, LEAVES.get(path[-1]))


def entries(file: str, content: Mapping[str, Any]) -> list[Leaf]:
    """Return the entries of a file that are changed one by one."""
    if file == "source.receipt.json":
        return [path for path in OF_A_RECORD if path[0] in content]
    if "tensors" in content:
        return OF_A_PART
    if file == "recipe.json":
        return [("default",)]
    if file != "plan.json":
        return [(name,) for name in content]
    deeper = [name for name in ("architecture", "drafter") if name in content]
    within = [path for name in deeper for path in leaves(content[name], 1, (name,))]
    return [*within, *OF_PARTS, *((name,) for name in content if name not in (*deeper, "parts"))]


def other_json(content: Mapping[str, Any], leaf: Leaf, file: Path) -> Path:
    """Write a content with one entry that is another; the other default of a recipe is a form."""
    write_json(file, changed(content, leaf, "int4" if leaf == ("default",) else None))
    return file


def other_text(text: Path, file: Path) -> Path:
    """Write a longer text."""
    file.write_text(text.read_text() + "more")
    return file


def other_content(file: Path, folder: Path) -> Path:
    """Return the path of a file with another content, if a step reads the file for its key."""
    made = folder / file.name
    made.unlink(missing_ok=True)
    if file.suffix == ".safetensors" and file.exists():
        save_file({name: tensor * 2 + 1 for name, tensor in load_file(file).items()}, made)
    elif file.name == "precision.json":
        write_json(made, {"schema": 1, "default": "int4", "matrices": {}})
    elif file.name == "search.json":
        content = read_json(file)
        few = {"forms": {}, "estimate": {"perplexity": 1.02}}
        write_json(made, {**content, **few, "points": dict.fromkeys(content["points"], few)})
    return made if made.exists() else file


def reasons(job: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield the exceptions for what a job is given."""
    for jobs, paths, _ in UNREAD:
        for pattern in jobs.split():
            whole = pattern if "/" in pattern or pattern == "*" else f"{pattern}/*"
            if fnmatchcase(job, whole):
                yield from ((jobs, one) for one in paths.split() if fnmatchcase(path, one))


def test_what_a_step_is_given_is_in_its_key(models: list[Model], tmp_path: Path) -> None:
    """Each exception holds somewhere: one that no longer does must go."""
    narrow: dict[str, list[str]] = {}
    unused = {(jobs, path) for jobs, paths, _ in UNREAD for path in paths.split()}
    for model, job in [(one, job) for one in models for job in one.jobs]:
        label, given = f"{job.step.name}/{model.name}/{job.one}", model.given(job)
        known = model.key(job, given)
        for name, value in given.items():
            for path, other in alternatives(name, value, tmp_path):
                excepted = {*reasons(label, path)}
                if excepted and not excepted & unused:
                    continue
                if model.key(job, {**given, name: other()}) == known:
                    unused -= excepted
                    if not excepted:
                        narrow.setdefault(label, []).append(path)
    assert narrow == {}
    assert unused == set()


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # of values that no config has
def test_every_setting_is_in_the_key_of_a_step(models: list[Model]) -> None:
    """Or decides which steps there are. A setting that is new is covered."""
    without = {path for model in models for path in leaves(model.settings)}
    for model in models:
        for job in {job.step.name: job for job in reversed(model.jobs)}.values():
            given = model.given(job)
            known = model.key(job, given)
            for path in [*without & {*leaves(model.settings)}]:
                settings = changed(model.settings, path, (LEAVES | WITHOUT).get(path[-1]))
                params = model.params(job, settings)
                other = params != {name: given[name] for name in params} and model.key(job, given | params) != known
                if other or model.steps(settings) != model.steps(model.settings):
                    without.discard(path)
    assert {".".join(path[:2] if path[0] == "parity" else path[:1]) for path in without} == IN_FILES


def test_the_stack_is_measured_anew_with_another_drafter(models: list[Model], tmp_path: Path) -> None:
    """Its packages may be the same: not every tensor of a drafter is in a program."""
    model = models[1]
    (job,) = (job for job in model.jobs if job.step.name == "parity_stack")
    given = model.given(job)
    known = model.key(job, given)
    record = read_json(given["record"])
    for path in (("drafter", "files"), ("files",)):
        write_json(tmp_path / "record.json", changed(record, path))
        assert model.key(job, {**given, "record": tmp_path / "record.json"}) != known
