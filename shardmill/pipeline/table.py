"""The step table: one row for each step of the pipeline, and the only description of the steps in Python.

The rules (rules/*.smk) repeat the table in Snakemake's language, and a test compares both. All other code about steps
reads the table: the memory of jobs, the ingredients of their keys, the files of a finished build, the forecast of
`shardmill why`, the report's drawing. `dag.Step` defines a row; the other functions of `dag` evaluate the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import machine
from shardmill.errors import ConfigError
from shardmill.evidence.folder import evidence_files
from shardmill.files import is_left_by_macos, parse_json
from shardmill.forms.form import INT4, INT8
from shardmill.forms.recipe import RULES, SEARCH
from shardmill.pipeline import dag
from shardmill.pipeline.dag import Step
from shardmill.pipeline.resources import Need
from shardmill.pipeline.steps import (
    benchmark,
    calibration,
    codes,
    convert,
    embedding,
    fetch,
    manifest,
    measured,
    original,
    parity,
    parity_stack,
    precision,
    provenance,
    reference,
    report,
    residency,
    search,
    sensitivity,
    split,
    witness,
)
from shardmill.pipeline.steps import compile as compiling

if TYPE_CHECKING:
    from shardmill.config import Benchmark, Config


def settings(config: Config) -> dict[str, Any]:
    """Return the config as plain data, as Snakemake compares and passes parameters."""
    from pydantic import TypeAdapter

    plain: dict[str, Any] = parse_json(TypeAdapter(type(config)).dump_json(config))
    return plain


def section(name: str, config: Config) -> Any:
    """Return a section of the config as plain data."""
    return settings(config)[name]


def option(name: str, config: Config) -> Any:
    """Return the config's value at a dotted name."""
    return reduce(getattr, name.split("."), config)


def engine(config: Config) -> dict[str, str]:
    """Return the engine that loads programs here, so that steps that load programs rerun if the engine changes."""
    return machine.engine()


def split_settings(config: Config) -> dict[str, Any]:
    """Return the settings that decide the plan: a change of another setting must not rerun the step."""
    return {name: value for name, value in settings(config).items() if name not in ("parity", "benchmark", "witness")}


def source_files(config: Config) -> list[str]:
    """Return the files of a local checkpoint, so that Snakemake sees changes; empty for a checkpoint on the hub."""
    if config.source.path is None:
        return []
    files = (file for file in Path(config.source.path).iterdir() if file.is_file())
    return sorted(str(file) for file in files if not is_left_by_macos(file))


def recipe_files(config: Config) -> list[str]:
    """Return the file with the form of each matrix, if the config names a file."""
    precision = config.convert.precision
    return [] if precision in RULES else [precision]


def _parity_text(config: Config) -> str:
    """Return the input text of the parity gates."""
    return config.parity.text


def calibrates(config: Config) -> bool:
    """Return whether codes are fitted to a text."""
    return config.convert.calibration is not None


def searches(config: Config) -> bool:
    """Return whether the build searches for forms."""
    return config.convert.precision == SEARCH


def _witnesses(config: Config) -> bool:
    """Return whether Apple's Core AI runtime computes every part too."""
    return config.witness


def witness_runtime(config: Config) -> dict[str, str]:
    """Return the Core AI runtime that is installed here; empty if the config does not ask for it."""
    from shardmill.witness import installed

    return installed.runtime() if config.witness else {}


def calibration_files(config: Config) -> list[str]:
    """Return the calibration text, if there is one."""
    return [config.convert.calibration.text] if config.convert.calibration else []


# Files that provenance lists with their hashes, by the input names of the step.
NAMED: Mapping[str, Callable[[Config], str | list[str]]] = {
    "text": _parity_text,
    "calibration": calibration_files,
    "recipe": recipe_files,
}


def calibration_settings(config: Config) -> dict[str, Any] | None:
    """Return the config's `convert.calibration`."""
    found: dict[str, Any] | None = settings(config)["convert"]["calibration"]
    return found


def search_settings(config: Config) -> dict[str, Any] | None:
    """Return the search's settings: its budget, the forms that it may take, and the points to be measured."""
    if not searches(config):
        return None
    found, search = settings(config)["convert"], config.convert.search
    return {"budget": found["budget"], "forms": list(search.forms), "measured": search.measured}


def coded_forms(config: Config) -> list[str]:
    """Return the forms besides INT4 that get codes; INT4 always gets codes."""
    return [name for name in config.convert.search.forms if name not in (INT4, INT8)] if searches(config) else []


def measures(config: Config) -> bool:
    """Return whether points of the front are measured."""
    return bool(config.points)


def measured_settings(config: Config) -> dict[str, Any] | None:
    """Return the windows of the calibration text for measurements of points."""
    known = calibration_settings(config)
    return known and {"window": known["window"], "held": known["held"], "windows": config.convert.search.windows}


def evidence(config: Config) -> list[str]:
    """Return imported measurements from other machines: no step makes these files, and the list may be empty."""
    return [str(file) for file in evidence_files(Path("build") / config.model)]


def benchmarks(config: Config) -> bool:
    """Return whether a build measures its speed."""
    return config.benchmark is not False


def benchmark_text(config: Config) -> str:
    """Return the file with the text of the benchmark's prompts. Raise ConfigError if the config has no benchmark."""
    return _benchmark(config).text


def task_files(config: Config) -> list[str]:
    """Return the benchmark's prompt files, so that Snakemake sees changes. Raise ConfigError without a benchmark."""
    found = _benchmark(config)
    folder, tasks = Path(found.task_prompts), found.tasks
    return sorted(str(file) for task in tasks for file in (folder / task).glob("*.txt"))


def _benchmark(config: Config) -> Benchmark:
    if config.benchmark is False:
        raise ConfigError(f"{config.model}: its config has `benchmark: false`; remove that to measure its speed")
    return config.benchmark


PACKAGE, BUNDLE, TABLE = "packages/{part}.mlpackage", "compiled/{part}.mlmodelc", "embedding.safetensors"
RECORD, PLAN, PART, STATES = "source.receipt.json", "plan.json", "parts/{part}.json", "reference.safetensors"
RECIPE, STACK, MODEL, SPEED = "precision.json", "parity/stack.json", "model.json", "benchmark/speed.json"
CODES, ORIGINAL = "codes/{part}.safetensors", "measured/original.safetensors"

STEPS: dict[str, Step] = {  # each after the steps whose files it reads
    "fetch": Step(
        fetch.task,
        makes={"record": RECORD},
        outside={"waits": source_files},
        params={"source": lambda config: settings(config)["source"]},
        needs=Need(300),
        packages=("huggingface-hub",),
        kept=False,
        delivered=True,
    ),
    "split": Step(
        split.task,
        makes={"summary": PLAN, "parts": (PART, "parts/embedding.json")},
        reads={"record": RECORD},
        outside={"recipe": recipe_files},
        params={"settings": split_settings},
        needs=Need(600),
        packages=("transformers",),
        on_the_side=True,
        amount="# part",
    ),
    "calibration": Step(
        calibration.task,
        makes={"edges": "calibration.safetensors"},
        reads={"summary": PLAN, "record": RECORD},
        outside={"text": calibration_files},
        params={"settings": calibration_settings},
        needs=Need(1100, layer=4, table=2),
        packages=("numpy", "safetensors", "tokenizers", "torch", "transformers"),
        wanted=calibrates,
        amount="in fp32",
    ),
    "codes": Step(
        codes.task,
        makes={"codes": CODES},
        reads={"part": PART, "summary": PLAN, "record": RECORD},
        takes={"edges": "calibration.safetensors"},
        params={"forms": coded_forms},
        needs=Need(1000, layer=8, largest=36),
        packages=("coremltools", "numpy", "safetensors", "torch", "transformers"),
        wanted=calibrates,
        amount="# file of codes",
    ),
    "sensitivity": Step(
        sensitivity.task,
        makes={"costs": "sensitivity/{part}.json"},
        reads={"part": PART, "summary": PLAN, "record": RECORD},
        takes={"edges": "calibration.safetensors", "codes": CODES},
        needs=Need(800, layer=8, largest=12, table=4, vocab=1500),
        each_thread=Need(260, largest=12, vocab=1100),
        packages=("coremltools", "numpy", "safetensors", "torch", "transformers"),
        wanted=searches,
        amount="# list of costs",
    ),
    "search": Step(
        search.task,
        makes={"chosen": "search.json"},
        reads={"parts": (PART,)},
        takes={"costs": "sensitivity/{part}.json"},
        params={"settings": search_settings},
        needs=Need(400),
        packages=("numpy", "scipy"),
        wanted=searches,
        amount="forms",
    ),
    "original": Step(
        original.task,
        makes={"states": ORIGINAL},
        reads={"summary": PLAN, "record": RECORD},
        outside={"text": calibration_files},
        params={"settings": measured_settings},
        needs=Need(1100, layer=4, table=2),
        packages=("numpy", "safetensors", "tokenizers", "torch", "transformers"),
        wanted=measures,
        amount="in fp32",
    ),
    "measured": Step(
        measured.task,
        makes={"figures": "measured/{point}.json"},
        reads={"summary": PLAN, "parts": (PART,), "record": RECORD},
        takes={"chosen": "search.json", "states": ORIGINAL, "codes": CODES},
        params={"point": lambda config: "{point}"},
        needs=Need(1700, layer=12, largest=12, table=2),
        packages=("coremltools", "numpy", "safetensors", "torch", "transformers"),
        wanted=measures,
        amount="# point",
    ),
    "precision": Step(
        precision.task,
        makes={"recipe": RECIPE},
        reads={"parts": (PART,)},
        takes={"chosen": dag.outputs_of_step("search")},
        outside={"source": recipe_files},
        params={"precision": lambda config: config.convert.precision},
        needs=Need(300),
        on_the_side=True,
        amount="a form each",
    ),
    "reference": Step(
        reference.task,
        makes={"states": STATES},
        reads={"summary": PLAN, "record": RECORD},
        outside={"text": _parity_text},
        params={"parity": lambda config: settings(config)["parity"]},
        needs=Need(950, whole=4, table=2, logits=12),  # fp32, three times over
        packages=("numpy", "safetensors", "tokenizers", "torch", "transformers"),
        amount="in fp32",
    ),
    "embedding": Step(
        embedding.task,
        makes={"table": TABLE},
        reads={"part": "parts/embedding.json", "record": RECORD},
        params={"form": lambda config: config.convert.embedding},
        needs=Need(400),
        packages=("numpy", "torch"),
        delivered=True,
        amount="# table",
    ),
    "convert": Step(
        convert.task,
        makes={"package": PACKAGE},
        reads={"part": PART, "record": RECORD},
        takes={"recipe": RECIPE, "codes": dag.outputs_of_step("codes")},
        params={"method": lambda config: config.convert.method},
        needs={
            "stamped": Need(800, part=0.05, bucket=900_000),  # blocks of rows; samples of a bucket's size
            "plain": Need(700, part=6.5, largest=46),  # coremltools copies: fp32, fp16, int8
        },
        packages=("coremltools", "numpy", "protobuf", "torch"),
        delivered=True,
        amount="# program",
    ),
    "compile": Step(
        compiling.task,
        makes={"bundle": BUNDLE},
        takes={"package": PACKAGE},
        params={"bundles": lambda config: config.program.bundles, "engine": engine},
        needs=Need(600),
        packages=("coremltools", "protobuf"),
        delivered=True,
        amount="# bundle",
    ),
    "residency": Step(
        residency.task,
        makes={"verdict": "residency/{part}.json"},
        reads={"part": PART},
        takes={"package": PACKAGE, "bundle": BUNDLE},
        params={"engine": engine},
        needs=Need(600),
        packages=("coremltools", "numpy", "protobuf", "torch"),
        amount="# gate file",
    ),
    "parity": Step(
        parity.task,
        makes={"verdict": "parity/{part}.json"},
        reads={"summary": PLAN, "part": PART, "record": RECORD},
        takes={
            "recipe": RECIPE,
            "states": STATES,
            "package": PACKAGE,
            "bundle": BUNDLE,
            "codes": dag.outputs_of_step("codes"),
        },
        params={"reshape": lambda config: config.program.reshape_frequency, "engine": engine},
        needs=Need(850, part=1.75, whole=3.5, expanded=8),
        packages=("coremltools", "numpy", "protobuf", "safetensors", "torch", "transformers"),
        amount="# gate file",
    ),
    "parity_stack": Step(
        parity_stack.task,
        makes={"verdict": STACK},
        reads={"summary": PLAN, "parts": (PART, "parts/embedding.json"), "record": RECORD},
        takes={
            "recipe": RECIPE,
            "states": STATES,
            "packages": PACKAGE,
            "bundles": BUNDLE,
            "table": TABLE,
            "chosen": dag.outputs_of_step("search"),
        },
        params={"reshape": lambda config: config.program.reshape_frequency, "engine": engine},
        needs=Need(1200, model=1.4, whole=3.5, expanded=8, logits=12),
        packages=("coremltools", "numpy", "protobuf", "safetensors", "torch", "transformers"),
        shown="parity",
    ),
    "witness": Step(
        witness.task,
        makes={"verdict": "witness/{part}.json"},
        reads={"summary": PLAN, "part": PART, "record": RECORD},
        takes={"states": STATES, "package": PACKAGE, "bundle": BUNDLE},
        params={"engine": engine, "runtime": witness_runtime},
        needs=Need(1600, part=1.75, whole=3.5, expanded=8),
        packages=("coremltools", "numpy", "protobuf", "safetensors", "torch", "transformers"),
        wanted=_witnesses,
        amount="# gate file",
    ),
    "manifest": Step(
        manifest.task,
        makes={"manifest": MODEL},
        reads={"summary": PLAN, "record": RECORD, "stack": STACK},
        takes={"packages": PACKAGE, "bundles": BUNDLE, "table": TABLE},
        params={
            "form": lambda config: config.convert.embedding,
            "reshape": lambda config: config.program.reshape_frequency,
        },
        needs=Need(300),
        kept=False,
        on_the_side=True,
        gated=True,
        delivered=True,
        shown="model.json",
        amount="for a runtime",
    ),
    "benchmark": Step(
        benchmark.task,
        makes={"speed": SPEED},
        reads={"manifest": MODEL},
        outside={"text": benchmark_text, "tasks": task_files},
        params={"settings": lambda config: settings(config)["benchmark"], "engine": engine},
        needs=Need(1300, model=1.2, expanded=4),
        packages=(
            "coremltools",
            "fastapi",
            "httpx2",
            "numpy",
            "protobuf",
            "pydantic",
            "safetensors",
            "starlette",
            "tokenizers",
            "torch",
            "uvicorn",
        ),
        also=("shardmill.serve.server",),
        wanted=benchmarks,
    ),
    "provenance": Step(
        provenance.task,
        makes={"provenance": "provenance.json", "results": "test-results.jsonl"},
        reads={"record": RECORD, "manifest": MODEL, "receipts": dag.receipts, "verdicts": dag.verdicts},
        outside=NAMED,
        params={"settings": settings},
        needs=Need(300),
        kept=False,
        delivered=True,
        amount="for a machine",
    ),
    "report": Step(
        report.task,
        makes={"page": "report.html", "plots": "plots", "receipt": "report.receipt.json"},
        reads={
            "manifest": MODEL,
            "summary": PLAN,
            "record": RECORD,
            "parts": (PART, "parts/embedding.json"),
            "artifacts": (PACKAGE, TABLE),
            "verdicts": dag.verdicts,
            "speed": dag.outputs_of_step("benchmark"),
            "receipts": dag.report_receipts,
            "search": dag.outputs_of_step("search"),
            "points": dag.outputs_of_step("measured"),
        },
        outside={"evidence": evidence},
        params={"settings": settings, "pipeline": lambda config: dag.step_rows(STEPS, config)},
        needs=Need(500),
        packages=("jinja2", "markupsafe", "matplotlib"),
        kept=False,
        delivered=True,
        amount="this page",
    ),
}
