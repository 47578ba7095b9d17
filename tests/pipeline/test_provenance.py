"""provenance.json: subjects, materials and steps, complete and the same wherever it is written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from manifests import manifest

from shardmill.files import digest, dumps, sealed, write_json
from shardmill.pipeline.provenance import statement

STEPS = ["plan", "reference", "packages/head_0", "compiled/head_0", "residency/head_0", "parity/head_0", "parity/stack"]


def write_build(folder: Path) -> tuple[Path, Path, list[Path]]:
    """A build of one part: (source.json, model.json, receipts)."""
    files = {"config.json": {"sha256": "c" * 64, "size": 1}, "model.safetensors": {"sha256": "d" * 64, "size": 2}}
    write_json(folder / "source.receipt.json", {"repo": "a/b", "commit": "e" * 40, "files": files})
    write_json(folder / "model.json", manifest())
    receipts = [folder / f"{name}.receipt.json" for name in STEPS]
    for path, name in zip(receipts, STEPS, strict=True):
        gate = name.startswith(("residency/", "parity/"))
        outputs = {"verdict": digest(name)} if gate else {"package": "f" * 64}
        write_json(path, sealed({"step": name, "key": name, "outputs": outputs}))
    return folder / "source.receipt.json", folder / "model.json", receipts


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Any]:
    return statement(*write_build(tmp_path))


def test_every_file_of_the_model_and_every_verdict_is_a_subject(made: dict[str, Any], tmp_path: Path) -> None:
    subjects = {row["name"]: row["digest"]["sha256"] for row in made["subject"]}
    assert subjects == {
        "model.json": hashlib.sha256((tmp_path / "model.json").read_bytes()).hexdigest(),
        "embedding.safetensors": "1" * 64,
        "source/tokenizer.json": "2" * 64,
        "source/tokenizer_config.json": "6" * 64,
        "compiled/head_0.mlmodelc/model.mil": "5" * 64,
        "packages/head_0.mlpackage/Manifest.json": "3" * 64,
        "packages/head_0.mlpackage/a/b": "4" * 64,
        **{f"{name}.json": digest(name) for name in ("residency/head_0", "parity/head_0", "parity/stack")},
    }


def test_the_checkpoint_is_named_file_by_file(made: dict[str, Any]) -> None:
    definition = made["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"model": "tiny", "repo": "a/b", "commit": "e" * 40}
    materials = {row["name"]: row["digest"]["sha256"] for row in definition["resolvedDependencies"]}
    assert materials == {"config.json": "c" * 64, "model.safetensors": "d" * 64}


def test_every_receipt_is_kept(made: dict[str, Any]) -> None:
    """Receipts of several steps share a file name: none may push another out."""
    steps = made["predicate"]["runDetails"]["shardmill_steps"]
    assert sorted(step["step"] for step in steps.values()) == sorted(STEPS)


def test_nothing_tells_where_or_when_it_was_written(tmp_path: Path) -> None:
    here, there = write_build(tmp_path / "here"), write_build(tmp_path / "elsewhere" / "there")
    assert dumps(statement(*here)) == dumps(statement(*there))
    assert str(tmp_path) not in json.dumps(statement(*here))


def test_it_is_an_in_toto_statement_with_slsa_provenance(made: dict[str, Any]) -> None:
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert made["predicateType"] == "https://slsa.dev/provenance/v1"
    assert made["subject"]
    assert {"buildType", "externalParameters", "resolvedDependencies"} <= set(made["predicate"]["buildDefinition"])
    # https://slsa.dev/spec/v1.0/provenance: builder.id is a TypeURI; fields of one's own begin with one's name.
    details = made["predicate"]["runDetails"]
    assert urlsplit(details["builder"]["id"]).scheme
    assert {name for name in details if not name.startswith("shardmill_")} <= {"builder", "metadata", "byproducts"}
    assert set(details.get("metadata", {})) <= {"invocationId", "startedOn", "finishedOn"}
