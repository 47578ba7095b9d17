"""Attestation: model.json's files and the gates' verdicts as subjects, the checkpoint's files as materials, every step
with its action key.

The form is an in-toto statement (https://in-toto.io/Statement/v1) with SLSA's provenance predicate
(https://slsa.dev/provenance/v1). Nothing in it varies from run to run; what is not known is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill import __version__
from shardmill.checkpoint.hashing import hash_file
from shardmill.checkpoint.paths import RECORD_FILE
from shardmill.errors import ShardmillError
from shardmill.files import read_json, read_sealed, sealed
from shardmill.pipeline.task import SOURCE
from shardmill.runtime.manifest import COMPLETE, entries, read_manifest

BUILD_TYPE = "urn:shardmill:build:v1"
BUILDER = "urn:shardmill"


def statement(record: Path, manifest: Path, receipts: Sequence[Path]) -> dict[str, Any]:
    """provenance.json's content.

    Args:
        record: source.receipt.json, whose bytes are also those of source/source.json.
        manifest: model.json.
        receipts: Those of all steps whose results are the same in every build.

    Raises:
        ShardmillError: One of them is damaged.
    """
    source, model = read_json(record), read_manifest(manifest.parent, COMPLETE)
    fetched = {"sha256": hash_file(record)}
    names = {path: path.relative_to(manifest.parent).as_posix().removesuffix(".receipt.json") for path in receipts}
    steps = {names[path]: read_sealed(path) for path in receipts}
    content = {
        "_type": "https://in-toto.io/Statement/v1",
        "predicateType": "https://slsa.dev/provenance/v1",
        "subject": [{"name": n, "digest": {"sha256": s}} for n, s in (*subjects(model, manifest), *verdicts(steps))],
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"model": model["model"], "repo": source["repo"], "commit": source["commit"]},
                "resolvedDependencies": [
                    {"name": name, "digest": {"sha256": file["sha256"]}} for name, file in source["files"].items()
                ],
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {"shardmill": __version__}},
                "byproducts": [{"name": n, "digest": fetched} for n in (record.name, f"{SOURCE}/{RECORD_FILE}")],
                "shardmill_steps": steps,  # an extension field: SLSA wants the vendor's name in front
            },
        },
    }
    return sealed(content)


def subjects(model: Mapping[str, Any], manifest: Path) -> Iterator[tuple[str, str]]:
    """(path, sha256) of model.json and of every file it names."""
    yield manifest.name, hash_file(manifest)
    for entry in entries(model):
        if "sha256" not in entry and "files" not in entry:
            raise ShardmillError(f"{manifest}: no sha256 of {entry['path']}; delete it and build again")
        yield from named(entry)


def named(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(path, sha256) of every file that an entry of model.json names."""
    if "sha256" in entry:
        yield entry["path"], entry["sha256"]
    for name, sha in entry.get("files", {}).items():
        yield f"{entry['path']}/{name}", sha


def check_files(model: Mapping[str, Any], build: Path) -> None:
    """Raises ShardmillError where a file is not the one that a manifest's content names."""
    for entry in entries(model):
        for name, sha in named(entry):
            if not (build / name).is_file() or hash_file(build / name) != sha:
                made = f"{SOURCE}.receipt.json" if name.startswith(f"{SOURCE}/") else entry["path"]
                what = "not the file that was made and judged"
                raise ShardmillError(f"{build / name}: {what}; remove {build / made} and build again")


def verdicts(steps: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(path, sha256) of what the gates said, given the receipts by step."""
    for name, receipt in steps.items():
        if "verdict" in receipt.get("outputs", {}):
            yield f"{name}.json", receipt["outputs"]["verdict"]
