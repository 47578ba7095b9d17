"""Attestation: model.json's files and the gates' verdicts as subjects, the checkpoint's files as materials, every step
with its action key.

The form is an in-toto statement (https://in-toto.io/Statement/v1) with SLSA's provenance predicate
(https://slsa.dev/provenance/v1). Nothing in it varies from run to run; what is not known is absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill import __version__
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.runtime.manifest import COMPLETE, entries, read_manifest

BUILD_TYPE = "urn:shardmill:build:v1"
BUILDER = "urn:shardmill"
SNAKEMAKE_MARK = ".snakemake_timestamp"  # put into every folder that is a job's output


def statement(record: Path, manifest: Path, receipts: Sequence[Path]) -> dict[str, Any]:
    """provenance.json's content. Args: source.json, model.json, the receipts of all steps."""
    source, model = json.loads(record.read_text()), read_manifest(manifest.parent, COMPLETE)
    names = {path: path.relative_to(manifest.parent).as_posix().removesuffix(".receipt.json") for path in receipts}
    steps = {names[path]: json.loads(path.read_text()) for path in receipts}
    return {
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
                "shardmill_steps": steps,  # an extension field: SLSA wants the vendor's name in front
            },
        },
    }


def subjects(model: Mapping[str, Any], manifest: Path) -> Iterator[tuple[str, str]]:
    """(path, sha256) of model.json and of every file it names."""
    yield manifest.name, hash_file(manifest)
    for entry in entries(model):
        if "sha256" not in entry and "files" not in entry:
            raise ShardmillError(f"{manifest}: no sha256 of {entry['path']}; delete it and build again")
        if "sha256" in entry:
            yield entry["path"], entry["sha256"]
        for name, sha in entry.get("files", {}).items():
            yield f"{entry['path']}/{name}", sha


def verdicts(steps: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(path, sha256) of what the gates said, given the receipts by step."""
    for name, receipt in steps.items():
        if "verdict" in receipt.get("outputs", {}):
            yield f"{name}.json", receipt["outputs"]["verdict"]


def extra_files(model: Mapping[str, Any], build: Path) -> Iterator[str]:
    """Files in the folders of programs and packages that model.json does not name, as paths relative to the build."""
    programs = [part["program"] for part in model["parts"]]
    for entry in (*programs, *model["packages"].values()):
        folder = build / entry["path"]
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            if file.is_file() and name not in entry.get("files", {}) and name != SNAKEMAKE_MARK:
                yield f"{entry['path']}/{name}"


def mismatches(build: Path) -> tuple[int, list[tuple[str, str]]]:
    """(files checked, [(path, what is wrong)]) of a finished build. Raises ShardmillError where there is none."""
    model = read_manifest(build, COMPLETE)
    (manifest, found), *named = subjects(model, build / "model.json")
    attestation = attested(build / "provenance.json")
    wrong = [(name, "not named by model.json") for name in extra_files(model, build)]
    if found != attestation.get(manifest):
        wrong.append((manifest, "not the bytes that provenance.json names"))
    known = {manifest, *dict(named)}
    gates = [(name, sha) for name, sha in attestation.items() if name not in known]
    wrong += [*_changed(build, named, "model.json"), *_changed(build, gates, "provenance.json")]
    return 1 + len(named) + len(gates), wrong


def _changed(build: Path, files: Sequence[tuple[str, str]], says: str) -> Iterator[tuple[str, str]]:
    for name, sha in files:
        path = build / name
        if not path.is_file():
            yield name, "missing"
        elif hash_file(path) != sha:
            yield name, f"not the bytes that {says} names"


def attested(provenance: Path) -> dict[str, str]:
    """The sha256 that a provenance.json gives of each file, by path; none where it is damaged or gone."""
    try:
        statement = json.loads(provenance.read_text(encoding="utf-8"))
        return {row["name"]: row["digest"]["sha256"] for row in statement["subject"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
