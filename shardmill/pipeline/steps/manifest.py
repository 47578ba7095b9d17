"""manifest: model.json, written only when every gate has passed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.checkpoint.layout import text_files
from shardmill.files import read_json, write_json
from shardmill.pipeline.provenance import check_files
from shardmill.pipeline.steptable import SOURCE
from shardmill.pipeline.store import read_receipt
from shardmill.runtime.manifest import runtime_manifest

TOKENIZER = "tokenizer.json"
Described = dict[str, dict[str, Any]]  # by part: a path relative to model.json, and hashes


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
    """Writes model.json (`made`). Its hashes are those that the receipts record, and every file is compared with them.

    Args: summary plan.json; record source.receipt.json; packages and bundles by part, with packaged and compiled their
    receipts; table embedding.safetensors and tabled its receipt. `gates` are inputs only because there is no
    model.json before they have passed.
    """
    root = made.parent

    def all_described(paths: list[Path], receipts: list[Path]) -> Described:
        return {path.stem: described(root, path, receipt) for path, receipt in zip(paths, receipts, strict=True)}

    programs = all_described(bundles, compiled), all_described(packages, packaged)
    plan, source = read_json(summary), read_json(record)
    content = model(plan, source, *programs, described(root, table, tabled))
    check_files(content, root)
    write_json(made, content)


def model(
    plan: Mapping[str, Any], source: Mapping[str, Any], bundles: Described, packages: Described, table: dict[str, Any]
) -> dict[str, Any]:
    """model.json's content. Args: what plan.json and source.json hold; bundles and packages by part, and the table."""
    content = runtime_manifest(plan, bundles, table)
    # Compiled bundles last as long as the system they were compiled for; the packages are what to compile again.
    content["packages"] = packages
    hashes = {name: file["sha256"] for name, file in source["files"].items()}
    content["tokenizer"] = {"path": f"{SOURCE}/{TOKENIZER}", "sha256": hashes[TOKENIZER]}
    # What chat and serve read beside it: the template, the special tokens, how to generate.
    others = sorted(set(text_files(hashes)) - {TOKENIZER})
    content["texts"] = {"path": SOURCE, "files": {name: hashes[name] for name in others}}
    content["source"] = {key: source[key] for key in ("repo", "commit")}
    return content


def described(root: Path, path: Path, receipt: Path) -> dict[str, Any]:
    """The path relative to `root`, and the sha256 of the file, or of each file in the folder, as it was made."""
    made = read_receipt(receipt)
    (name,) = made["outputs"]
    where = {"path": path.relative_to(root).as_posix()}
    return where | ({"files": made["files"][name]} if path.is_dir() else {"sha256": made["outputs"][name]})
