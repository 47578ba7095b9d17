"""manifest: model.json, written only when every gate has passed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardmill import canonical
from shardmill.checkpoint.hashing import hash_files
from shardmill.manifest import runtime_manifest
from shardmill.steps import source_folder
from shardmill.store import Store

SNAKEMAKE_MARK = ".snakemake_timestamp"  # put into every folder that is a job's output


def run(
    summary: Path,
    record: Path,
    packages: list[Path],
    bundles: list[Path],
    table: Path,
    made: Path,
    store: str,
    gates: list[Path],
) -> None:
    """Args: summary plan.json; record source.receipt.json; packages and bundles by part; table the embedding; made

    model.json. `gates` are inputs only because there is no model.json before they have passed.
    """
    root, hashes = made.parent, Store(Path(store)).hashes

    def described(path: Path) -> dict[str, Any]:
        """Relative path, and sha256 of the file or of each file in the folder."""
        where = path.relative_to(root).as_posix()
        if path.is_file():
            return {"path": where, "sha256": hash_files([path], hashes)[path]}
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != SNAKEMAKE_MARK)
        shas = hash_files(files, hashes)
        return {"path": where, "files": {file.relative_to(path).as_posix(): shas[file] for file in files}}

    plan = json.loads(summary.read_text())
    programs = {bundle.stem: described(bundle) for bundle in bundles}
    content = runtime_manifest(plan, programs, described(table))
    # Compiled bundles last as long as the system they were compiled for; the packages are what to compile again.
    content["packages"] = {package.stem: described(package) for package in packages}
    content["tokenizer"] = described(source_folder(record) / "tokenizer.json")
    content["source"] = {key: json.loads(record.read_text())[key] for key in ("repo", "commit")}
    canonical.write_json(made, content)
