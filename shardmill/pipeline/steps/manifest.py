"""manifest: model.json, written only when every gate has passed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.checkpoint.headers import read_header
from shardmill.checkpoint.layout import text_files
from shardmill.files import read_json, write_json
from shardmill.pipeline.subjects import check_files
from shardmill.pipeline.task import SOURCE, Artifact, Task
from shardmill.runtime.manifest import runtime_manifest

TOKENIZER = "tokenizer.json"


def task(summary: Path, record: Path, packages: list[Artifact], bundles: list[Artifact], table: Artifact) -> Task:
    """model.json. Its hashes are those that the receipts record, and every file is compared with them.

    Args:
        summary: plan.json.
        record: source.receipt.json.
        packages: the .mlpackage of every part.
        bundles: the .mlmodelc of every part.
        table: embedding.safetensors.
    """
    root = summary.parent

    def work(made: Mapping[str, Path]) -> None:
        plan, source = read_json(summary), read_json(record)
        content = runtime_manifest(plan, _by_part(bundles, root), _described(table, root) | _form(table.path))
        # Compiled bundles last as long as the system they were compiled for; the packages are what to compile again.
        content["packages"] = _by_part(packages, root)
        hashes = {name: file["sha256"] for name, file in source["files"].items()}
        content["tokenizer"] = {"path": f"{SOURCE}/{TOKENIZER}", "sha256": hashes[TOKENIZER]}
        # What chat and serve read beside it: the template, the special tokens, how to generate.
        others = sorted(set(text_files(hashes)) - {TOKENIZER})
        content["texts"] = {"path": SOURCE, "files": {name: hashes[name] for name in others}}
        content["source"] = {key: source[key] for key in ("repo", "commit")}
        check_files(content, root)
        write_json(made["manifest"], content)

    return Task(work)


def _form(table: Path) -> dict[str, str]:
    """What a runtime has to know of the table's numbers, unless they are fp16."""
    kinds = {tensor.name: tensor.dtype for tensor in read_header(table.parent, table.name)}
    return {"form": "int8"} if kinds["embedding"] == "I8" else {}


def _by_part(artifacts: list[Artifact], root: Path) -> dict[str, dict[str, Any]]:
    return {artifact.path.stem: _described(artifact, root) for artifact in artifacts}


def _described(artifact: Artifact, root: Path) -> dict[str, Any]:
    """The path relative to `root`, and the sha256 of the file, or of each file in the folder, as it was made."""
    where = {"path": artifact.path.relative_to(root).as_posix()}
    return where | ({"files": dict(artifact.files)} if artifact.files else {"sha256": artifact.sha256})
