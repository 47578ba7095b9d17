"""manifest: model.json, written only when every gate has passed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardmill import canonical
from shardmill.checkpoint.layout import text_files
from shardmill.manifest import runtime_manifest
from shardmill.steps import source_folder
from shardmill.store import read_receipt


def run(
    summary: Path,
    record: Path,
    packages: list[Path],
    packaged: list[Path],
    bundles: list[Path],
    compiled: list[Path],
    table: Path,
    tabled: Path,
    made: Path,
    gates: list[Path],
) -> None:
    """Writes model.json (`made`). Its hashes are those that the receipts record: no byte is read once more.

    Args: summary plan.json; record source.receipt.json; packages and bundles by part, with packaged and compiled their
    receipts; table embedding.safetensors and tabled its receipt. `gates` are inputs only because there is no
    model.json before they have passed.
    """
    root, source = made.parent, json.loads(record.read_text())
    plan = json.loads(summary.read_text())

    def all_described(paths: list[Path], receipts: list[Path]) -> dict[str, dict[str, Any]]:
        return {path.stem: described(root, path, receipt) for path, receipt in zip(paths, receipts, strict=True)}

    content = runtime_manifest(plan, all_described(bundles, compiled), described(root, table, tabled))
    # Compiled bundles last as long as the system they were compiled for; the packages are what to compile again.
    content["packages"] = all_described(packages, packaged)
    tokenizer = source_folder(record) / "tokenizer.json"
    content["tokenizer"] = {
        "path": tokenizer.relative_to(root).as_posix(),
        "sha256": source["files"][tokenizer.name]["sha256"],
    }
    # What chat and serve read beside it: the template, the special tokens, how to generate.
    others = sorted(set(text_files(source["files"])) - {tokenizer.name})
    content["texts"] = {
        "path": tokenizer.parent.relative_to(root).as_posix(),
        "files": {name: source["files"][name]["sha256"] for name in others},
    }
    content["source"] = {key: source[key] for key in ("repo", "commit")}
    canonical.write_json(made, content)


def described(root: Path, path: Path, receipt: Path) -> dict[str, Any]:
    """The path relative to `root`, and the sha256 of the file, or of each file in the folder, as it was made."""
    made = read_receipt(receipt)
    (name,) = made["outputs"]
    where = {"path": path.relative_to(root).as_posix()}
    return where | ({"files": made["files"][name]} if path.is_dir() else {"sha256": made["outputs"][name]})
