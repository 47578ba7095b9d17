"""The step table: one row for each step of the pipeline, and nothing of it is said elsewhere in Python.

The rules (rules/*.smk) say the same in Snakemake's words, literally, and a test compares them with the table. All else
that deals with steps reads it: what jobs need of memory, what decides their results, which files a finished build has,
what `shardmill why` foresees, what the report draws. `step.Step` says what a row holds, `dag` what follows from them.
"""

from __future__ import annotations

from shardmill.pipeline import configured, dag
from shardmill.pipeline.memory import Need
from shardmill.pipeline.step import Step
from shardmill.pipeline.steps import (
    benchmark,
    convert,
    embedding,
    fetch,
    manifest,
    parity,
    parity_stack,
    precision,
    provenance,
    reference,
    report,
    residency,
    split,
)
from shardmill.pipeline.steps import compile as compiling

PACKAGE, BUNDLE, TABLE = "packages/{part}.mlpackage", "compiled/{part}.mlmodelc", "embedding.safetensors"
RECORD, PLAN, PART, STATES = "source.receipt.json", "plan.json", "parts/{part}.json", "reference.safetensors"
RECIPE, MODEL, SPEED = "precision.json", "model.json", "benchmark/speed.json"

STEPS: dict[str, Step] = {  # each after those that it reads from
    "fetch": Step(
        fetch.task,
        makes={"record": RECORD},
        outside={"waits": configured.source_files},
        params={"source": lambda config: configured.settings(config)["source"]},
        needs=Need(300),
        packages=("huggingface-hub",),
        kept=False,
        delivered=True,
    ),
    "split": Step(
        split.task,
        makes={"summary": PLAN, "parts": (PART, "parts/embedding.json")},
        reads={"record": RECORD},
        outside={"recipe": configured.recipe_files},
        params={"settings": configured.split_settings},
        needs=Need(600),
        packages=("transformers",),
        on_the_side=True,
        amount="# part",
    ),
    "precision": Step(
        precision.task,
        makes={"recipe": RECIPE},
        reads={"parts": (PART,)},
        outside={"source": configured.recipe_files},
        params={"precision": lambda config: config.convert.precision},
        needs=Need(300),
        on_the_side=True,
        lane=2.5,
        amount="a form each",
    ),
    "reference": Step(
        reference.task,
        makes={"states": STATES},
        reads={"summary": PLAN, "record": RECORD},
        outside={"text": lambda config: config.parity.text},
        params={"parity": lambda config: configured.settings(config)["parity"]},
        needs=Need(850, layer=4, table=2, logits=12),  # fp32, three times over
        packages=("numpy", "safetensors", "tokenizers", "torch", "transformers"),
        lane=1,
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
        lane=0,
        amount="# table",
    ),
    "convert": Step(
        convert.task,
        makes={"package": PACKAGE},
        reads={"part": PART, "recipe": RECIPE, "record": RECORD},
        params={"method": lambda config: config.convert.method},
        needs={
            "stamped": Need(800, part=0.05),  # a few blocks of rows; the program grows with its layers
            "plain": Need(700, part=6.5, largest=46),  # coremltools copies: fp32, fp16, int8
        },
        packages=("coremltools", "numpy", "protobuf", "torch"),
        delivered=True,
        lane=2.5,
        amount="# program",
    ),
    "compile": Step(
        compiling.task,
        makes={"bundle": BUNDLE},
        takes={"package": PACKAGE},
        needs=Need(600),
        packages=("coremltools", "protobuf"),
        delivered=True,
        lane=2.5,
        amount="# bundle",
    ),
    "residency": Step(
        residency.task,
        makes={"verdict": "residency/{part}.json"},
        reads={"part": PART},
        takes={"package": PACKAGE, "bundle": BUNDLE},
        needs=Need(600),
        packages=("coremltools", "numpy", "protobuf", "torch"),
        wording=True,  # what the placement rules say is in the verdict
        lane=2.25,
        amount="# gate file",
    ),
    "parity": Step(
        parity.task,
        makes={"verdict": "parity/{part}.json"},
        reads={"summary": PLAN, "part": PART, "recipe": RECIPE, "record": RECORD},
        takes={"states": STATES, "package": PACKAGE, "bundle": BUNDLE},
        needs=Need(850, part=1.4, layer=3.5, expanded=8),
        packages=("coremltools", "numpy", "protobuf", "safetensors", "torch", "transformers"),
        lane=0.75,
        amount="# gate file",
    ),
    "parity_stack": Step(
        parity_stack.task,
        makes={"verdict": "parity/stack.json"},
        reads={"summary": PLAN, "parts": (PART, "parts/embedding.json"), "recipe": RECIPE, "record": RECORD},
        takes={"states": STATES, "packages": PACKAGE, "bundles": BUNDLE, "table": TABLE},
        needs=Need(1000, model=1.0, layer=3.5, expanded=8, logits=12),
        packages=("coremltools", "numpy", "protobuf", "safetensors", "torch", "transformers"),
        drawn="parity",
    ),
    "manifest": Step(
        manifest.task,
        makes={"manifest": MODEL},
        reads={"summary": PLAN, "record": RECORD},
        takes={"packages": PACKAGE, "bundles": BUNDLE, "table": TABLE},
        params={"form": lambda config: config.convert.embedding},
        needs=Need(300),
        kept=False,
        on_the_side=True,
        gated=True,
        delivered=True,
        drawn="model.json",
        amount="for a runtime",
    ),
    "benchmark": Step(
        benchmark.task,
        makes={"speed": SPEED},
        reads={"manifest": MODEL},
        outside={"text": lambda config: config.benchmark.text, "tasks": configured.task_files},
        params={"settings": lambda config: configured.settings(config)["benchmark"]},
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
        also=("shardmill.serve.load", "shardmill.serve.server"),
        lane=0.75,
    ),
    "provenance": Step(
        provenance.task,
        makes={"provenance": "provenance.json", "results": "test-results.jsonl"},
        reads={"record": RECORD, "manifest": MODEL, "receipts": dag.receipts, "verdicts": dag.verdicts},
        outside={"text": lambda config: config.parity.text},
        params={"settings": configured.settings},
        needs=Need(300),
        kept=False,
        delivered=True,
        lane=2.25,
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
            "speed": SPEED,
            "receipts": dag.receipts,
        },
        params={"settings": configured.settings, "pipeline": lambda config: dag.drawn(STEPS, config)},
        needs=Need(500),
        packages=("jinja2", "markupsafe", "matplotlib"),
        kept=False,
        delivered=True,
        lane=0.75,
        amount="this page",
    ),
}
