"""Builds of tiny encoders: a folder with model.json, its programs, tables and tokenizer, made as the steps do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coremltools as ct
import tiny
from models import tiny_encoders

from shardmill import config
from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.layout import text_files
from shardmill.convert.table import write_table
from shardmill.files import write_json
from shardmill.machine import load_programs_as
from shardmill.pipeline.steps.split import split
from shardmill.plan import Part
from shardmill.runtime.manifest import runtime_manifest


def parts_of(checkpoint: Path, folder: Path, **changes: Any) -> tuple[Path, dict[str, Part], dict[str, Any]]:
    """The fetched checkpoint, its parts by name, and plan.json's content."""
    source = tiny.fetched(checkpoint, folder / "source")
    files = json.loads((source / "source.json").read_text())["files"]
    settings = config.parse(tiny_encoders.settings(source, **changes))
    parts, plan = split(source, settings, HashCache(folder / "hashes"), files)
    return source, {part.name: part for part in parts}, plan


def build(checkpoint: Path, folder: Path, weights: str = "fp16", **changes: Any) -> Path:
    """A build of a checkpoint. Weights in fp16 are those of the checkpoint, which is in bf16."""
    source, parts, plan = parts_of(checkpoint, folder, **changes)
    write_table(parts.pop("embedding"), source, folder / "embedding.safetensors", 1)
    programs: dict[str, Mapping[str, Any]] = {}
    for name, part in parts.items():
        made = folder / f"{name}.mlpackage"
        tiny.convert(part, source, made, weights)
        with load_programs_as("fp16"):
            ct.models.utils.compile_model(str(made), str(folder / f"{name}.mlmodelc"))
        programs[name] = {"path": f"{name}.mlmodelc"}
    dense = [{"path": f"source/{one['file']}", "activation": one["activation"]} for one in plan["dense"]]
    content = runtime_manifest(plan, programs, {"path": "embedding.safetensors"}, dense=dense)
    texts = {name: "0" * 64 for name in text_files([file.name for file in source.iterdir()])}
    content |= {"tokenizer": {"path": "source/tokenizer.json"}, "texts": {"path": "source", "files": texts}}
    write_json(folder / "model.json", content)
    return folder
