"""model.json: relative paths, the bytes' hashes, and nothing that Snakemake left lying about."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from shardmill import canonical
from shardmill.steps import manifest

PLAN: dict[str, Any] = {
    "model": "tiny",
    "context": 64,
    "tokens_max": 4,
    "widths": [1, 4],
    "eos_token_ids": [0],
    "architecture": {
        "vocab": 256,
        "graph": {"hidden": 96},
        "rope": {"inv_freq": [1.0], "scale": 1.2, "factors": "short"},
    },
    "parts": [
        {"name": "layers_00_02", "kind": "layers", "start": 0, "end": 2, "weight_bytes": 1},
        {"name": "head_0", "kind": "head", "start": 0, "end": 256, "weight_bytes": 1},
        {"name": "embedding", "kind": "embedding", "start": 0, "end": 256, "weight_bytes": 1},
    ],
}
PARTS = ("layers_00_02", "head_0")


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A built model's files, with the mark that Snakemake puts into each folder."""
    folder = tmp_path / "build" / "tiny"
    files = {"embedding.safetensors": "table", "source/tokenizer.json": "{}"}
    for part in PARTS:
        for program in (f"packages/{part}.mlpackage", f"compiled/{part}.mlmodelc"):
            files |= {f"{program}/inner/data": part, f"{program}/.snakemake_timestamp": ""}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    canonical.write_json(folder / "plan.json", PLAN)
    canonical.write_json(folder / "source.receipt.json", {"repo": None, "commit": "local", "files": {}})
    return folder


def written(build: Path) -> dict[str, Any]:
    manifest.run(
        summary=build / "plan.json",
        record=build / "source.receipt.json",
        packages=[build / f"packages/{part}.mlpackage" for part in PARTS],
        bundles=[build / f"compiled/{part}.mlmodelc" for part in PARTS],
        table=build / "embedding.safetensors",
        made=build / "model.json",
        store=str(build.parent / ".store"),
        gates=[],
    )
    content: dict[str, Any] = json.loads((build / "model.json").read_text())
    return content


def described(content: dict[str, Any]) -> dict[str, str]:
    """Every file that model.json names, with its sha256."""
    found = {}
    entries = [content["embedding"], content["tokenizer"], *(part["program"] for part in content["parts"])]
    for entry in (*entries, *content["packages"].values()):
        if "sha256" in entry:
            found[entry["path"]] = entry["sha256"]
        found |= {f"{entry['path']}/{name}": sha for name, sha in entry.get("files", {}).items()}
    return found


def test_every_file_is_named_by_a_relative_path_with_its_hash(build: Path) -> None:
    found = described(written(build))
    expected = {"embedding.safetensors", "source/tokenizer.json"}
    expected |= {f"packages/{part}.mlpackage/inner/data" for part in PARTS}
    expected |= {f"compiled/{part}.mlmodelc/inner/data" for part in PARTS}
    assert set(found) == expected
    assert all(hashlib.sha256((build / name).read_bytes()).hexdigest() == sha for name, sha in found.items())


def test_parts_stand_in_the_order_of_a_pass(build: Path) -> None:
    content = written(build)
    assert [(p["name"], p["kind"], p["start"], p["end"]) for p in content["parts"]] == [
        ("layers_00_02", "layers", 0, 2),
        ("head_0", "head", 0, 256),
    ]
    assert [p["program"]["path"] for p in content["parts"]] == [
        "compiled/layers_00_02.mlmodelc",
        "compiled/head_0.mlmodelc",
    ]


def test_it_carries_what_a_runtime_needs(build: Path) -> None:
    content = written(build)
    plain = ("model", "context", "tokens_max", "widths", "vocab", "hidden", "rope", "mask_value", "eos_token_ids")
    assert {key: content[key] for key in plain} == {
        "model": "tiny",
        "context": 64,
        "tokens_max": 4,
        "widths": [1, 4],
        "vocab": 256,
        "hidden": 96,
        "rope": PLAN["architecture"]["rope"],
        "mask_value": -1e4,
        "eos_token_ids": [0],
    }


def test_it_is_the_same_wherever_it_is_written(build: Path, tmp_path: Path) -> None:
    import shutil

    first = canonical.dumps(written(build))
    moved = tmp_path / "another" / "place"
    shutil.copytree(build, moved)
    assert canonical.dumps(written(moved)) == first
    assert str(tmp_path) not in first
