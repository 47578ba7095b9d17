"""The bill of materials: valid CycloneDX, complete, the same whenever it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from pipeline import made

from shardmill.files import read_json
from shardmill.release.bundle import BOM, write_bom
from shardmill.release.publishable import License


@pytest.fixture
def bom(build: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    write_bom(build, License("apache-2.0"))
    return read_json(build / BOM)  # type: ignore[no-any-return]


def test_it_is_valid_by_the_library_s_strict_schema(build: Path, bom: dict[str, Any]) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str((build / BOM).read_text()) is None
    assert validator.validate_str((build / BOM).read_text().replace('"components"', '"comps"')) is not None


def test_the_model_descends_from_its_checkpoint(bom: dict[str, Any]) -> None:
    model = bom["metadata"]["component"]
    (ancestor,) = model["pedigree"]["ancestors"]
    assert (model["type"], model["name"], ancestor["type"]) == (
        "machine-learning-model",
        "tiny",
        "machine-learning-model",
    )
    assert model["licenses"] == ancestor["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert "source/model.safetensors" in {inner["name"] for inner in ancestor["components"]}


def test_a_checkpoint_on_a_hub_has_its_address(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(made.SETTINGS, "source", {"repo": "acme/tiny", "revision": "e" * 40})
    record = read_json(build / "source.receipt.json") | {"repo": "acme/tiny", "commit": "e" * 40}
    made.write_json(build / "source.receipt.json", record)
    made.attest(build)
    write_bom(build, License("other", "acme-1"))
    (ancestor,) = read_json(build / BOM)["metadata"]["component"]["pedigree"]["ancestors"]
    assert ancestor["purl"] == f"pkg:huggingface/acme/tiny@{'e' * 40}"
    assert ancestor["licenses"] == [{"license": {"name": "acme-1"}}]


def test_every_file_and_every_tool_is_listed(build: Path, bom: dict[str, Any]) -> None:
    listed = {component["name"]: component for component in bom["components"]}
    assert listed["model.json"]["hashes"] == [{"alg": "SHA-256", "content": made.hash_file(build / "model.json")}]
    assert listed["compiled/head_0.mlmodelc/inner/data"]["type"] == "file"
    assert listed["torch"]["purl"].startswith("pkg:pypi/torch@")
    assert listed["packaging"]["type"] == "library"
    (model,) = [row for row in bom["dependencies"] if row["ref"] == "model"]
    assert {ref.split("@")[0] for ref in model["dependsOn"]} >= {"pkg:pypi/torch", "pkg:pypi/coremltools"}


def test_it_is_the_same_whenever_it_is_written(build: Path, bom: dict[str, Any]) -> None:
    before = (build / BOM).read_bytes()
    write_bom(build, License("apache-2.0"))
    assert (build / BOM).read_bytes() == before
    assert "timestamp" not in bom["metadata"]
