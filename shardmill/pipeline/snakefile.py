"""What the Snakefile asks of the library: the checked config, lists of files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shardmill.config import Config, parse
from shardmill.errors import ConfigError, ShardmillError
from shardmill.pipeline import memory
from shardmill.pipeline.lock import hold_lock
from shardmill.pipeline.settle import settle
from shardmill.pipeline.steptable import watched
from shardmill.yamlfile import read_yaml

__all__ = [
    "all_receipts",
    "artifacts",
    "checked",
    "gate_receipts",
    "mem_mb",
    "only_build",
    "settings",
    "split_settings",
    "source_files",
    "task_files",
    "watched",
]


def checked(config: Mapping[str, Any], workflow: Any) -> Config:
    """The validated config; what is wrong with it ends the run with one line, before any work."""
    name = ", ".join(os.path.relpath(file) for file in workflow.configfiles) or "config"
    try:
        for file in workflow.configfiles:
            read_yaml(Path(file))  # Snakemake has read it, but takes the last of a key given twice
        found = parse(config, name)
        for problem in file_problems(found):
            raise ConfigError(f"{name}: {problem}")
        return settle(found, name)
    except ConfigError as error:
        sys.exit(f"shardmill: {error}")


def file_problems(config: Config) -> list[str]:
    """Files that a build reads, later perhaps than hours from now, and that are not there or are empty."""
    named = {"parity.text": Path(config.parity.text), "benchmark.text": Path(config.benchmark.text)}
    problems = [
        f"{key}: {text} is no file with text in it"
        for key, text in named.items()
        if not text.is_file() or not text.stat().st_size
    ]
    folders = [Path(config.benchmark.task_prompts) / task for task in config.benchmark.tasks]
    problems += [f"benchmark.tasks: {folder} holds no .txt file" for folder in folders if not any(folder.glob("*.txt"))]
    if config.source.path and not (Path(config.source.path) / "tokenizer.json").is_file():
        problems.append(f"source.path: {config.source.path} holds no tokenizer.json")
    return problems


def mem_mb(config: Config, workflow: Any) -> Callable[[str], memory.Resource | int]:
    """What a step's rule declares as mem_mb, see `memory.declared`; the limit is what --resources mem_mb says."""
    limit = workflow.global_resources.get("mem_mb").value
    return memory.declared(Path("build") / config.model, config.convert.method, limit)


def settings(config: Config) -> dict[str, Any]:
    """The config as plain data, as Snakemake compares and passes parameters."""
    plain: dict[str, Any] = json.loads(TypeAdapter(Config).dump_json(config))
    return plain


def split_settings(config: Config) -> dict[str, Any]:
    """What of the config decides the plan: other settings must not make anything again."""
    return {name: value for name, value in settings(config).items() if name not in ("parity", "benchmark")}


def source_files(config: Config) -> list[str]:
    """Files of a local checkpoint, so that Snakemake sees them change; none for one on the hub."""
    if config.source.path is None:
        return []
    return sorted(str(file) for file in Path(config.source.path).iterdir() if file.is_file())


def task_files(config: Config) -> list[str]:
    """The benchmark's prompts, so that Snakemake sees them change."""
    folder, tasks = Path(config.benchmark.task_prompts), config.benchmark.tasks
    return sorted(str(file) for task in tasks for file in (folder / task).glob("*.txt"))


def gate_receipts(config: Config) -> list[str]:
    """Receipts that exist only when every gate has passed; {model} is left as a wildcard."""
    gates = [f"residency/{part}" for part in config.parts]
    gates += [f"parity/{part}" for part in (*config.parts, "stack")]
    return [f"build/{{model}}/{gate}.receipt.json" for gate in gates]


def all_receipts(config: Config) -> list[str]:
    """Receipts of every step that has one."""
    names = ["plan", "reference", "embedding"]
    names += [f"{folder}/{part}" for folder in ("packages", "compiled") for part in config.parts]
    return [f"build/{{model}}/{name}.receipt.json" for name in names] + gate_receipts(config)


def artifacts(config: Config) -> list[str]:
    """What a finished build consists of. Of files that are not asked for, Snakemake does not see that one is gone."""
    names = ["report.html", "provenance.json", "model.json", "embedding.safetensors", "source.receipt.json"]
    names += [f"packages/{part}.mlpackage" for part in config.parts]
    names += [f"compiled/{part}.mlmodelc" for part in config.parts]
    return [f"build/{{model}}/{name}" for name in names]


def only_build(build: str) -> None:
    """Makes this run of Snakemake the only build in the folder, or ends it with one line."""
    try:
        hold_lock(build)
    except (ShardmillError, OSError) as error:
        sys.exit(f"shardmill: {error}")
