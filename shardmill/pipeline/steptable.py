"""The steps of the pipeline: each reads paths, asks the store whether there is work, and writes its artifacts.

Nothing heavy is imported here or at the top of a step, so that a step without work is done in well under a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.models import supported
from shardmill.pipeline.fingerprint import code_digest, package_versions


@dataclass(frozen=True)
class Tools:
    """What does a step's work: library modules, and the packages that decide its bytes."""

    modules: tuple[str, ...]
    packages: tuple[str, ...]


SOURCE = "source"  # the folder of a build in which the checkpoint's files lie
GRAPHS = tuple(f"shardmill.models.families.{name}" for name in supported())

TOOLS = {
    "fetch": Tools(("shardmill.pipeline.steps.fetch",), ("huggingface-hub",)),
    "split": Tools(("shardmill.pipeline.steps.split", *GRAPHS), ("transformers",)),
    "embedding": Tools(("shardmill.pipeline.steps.embedding",), ("numpy", "safetensors")),
    "convert": Tools(("shardmill.pipeline.steps.convert",), ("coremltools", "numpy", "protobuf", "torch")),
    "compile": Tools(("shardmill.pipeline.steps.compile",), ("coremltools", "protobuf")),
    "reference": Tools(("shardmill.pipeline.steps.reference",), ("tokenizers", "torch", "transformers")),
    "residency": Tools(("shardmill.pipeline.steps.residency",), ("coremltools", "protobuf")),
    "parity": Tools(("shardmill.pipeline.steps.parity",), ("coremltools", "numpy", "torch", "transformers")),
    "parity_stack": Tools(
        ("shardmill.pipeline.steps.parity_stack",), ("coremltools", "numpy", "torch", "transformers")
    ),
    "benchmark": Tools(
        ("shardmill.pipeline.steps.benchmark", "shardmill.serve.load", "shardmill.serve.server"),
        ("coremltools", "numpy", "torch"),
    ),
    "manifest": Tools(("shardmill.pipeline.steps.manifest",), ()),
    "provenance": Tools(("shardmill.pipeline.steps.provenance",), ()),
    "report": Tools(("shardmill.pipeline.steps.report",), ("jinja2", "matplotlib")),
}


def ingredients(step: str) -> dict[str, Any]:
    """Code digest and package versions of a step, as its action key has them."""
    tools = TOOLS[step]
    return {"code": code_digest(tools.modules), "packages": package_versions(tools.packages)}


def watched() -> dict[str, str]:
    """One short digest per step: given to Snakemake as a parameter, so that a change of the library reruns the step."""
    from shardmill.files import digest

    return {step: digest(ingredients(step))[:16] for step in TOOLS}


def source_folder(record: Path) -> Path:
    """Where the checkpoint's files lie, given source.receipt.json.

    The receipt stands beside the folder, not in it: Snakemake removes a job's outputs before it runs, and the folder
    must not lose its source.json by that.
    """
    return record.parent / SOURCE
