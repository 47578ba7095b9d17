"""model.json: relative paths, the hashes of what was made, and nothing that Snakemake left lying about."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardmill.files import dumps, write_json
from shardmill.pipeline.provenance import mismatches
from shardmill.pipeline.steps import manifest, provenance
from shardmill.pipeline.store import Action, Store
from shardmill.runtime.manifest import COMPLETE

PLAN: dict[str, Any] = {
    "model": "tiny",
    "context": 64,
    "tokens_max": 4,
    "widths": [1, 4],
    "eos_token_ids": [0],
    "architecture": {
        "vocab": 256,
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
    """A built model's files and receipts, with the mark that Snakemake puts into each folder."""
    folder = tmp_path / "build" / "tiny"
    store = Store(tmp_path / "build" / ".store")
    for part in PARTS:
        for step, output in (("packages", "package"), ("compiled", "bundle")):
            path = programs(folder, step)[PARTS.index(part)]
            store.perform(Action(step, {"part": part}), {output: path}, receipt(path), partial(make, part, output))
            (path / ".snakemake_timestamp").touch()
    table = folder / "embedding.safetensors"
    store.perform(Action("embedding"), {"table": table}, receipt(table), lambda made: make_file(made["table"]))
    (folder / "source").mkdir()
    (folder / "source/tokenizer.json").write_text("{}")
    write_json(folder / "plan.json", PLAN)
    (folder / "source/tokenizer_config.json").write_text("[]")
    files = {
        "tokenizer.json": {"sha256": hashlib.sha256(b"{}").hexdigest(), "size": 2},
        "tokenizer_config.json": {"sha256": hashlib.sha256(b"[]").hexdigest(), "size": 2},
        "model.safetensors": {"sha256": "0" * 64, "size": 2},
    }
    write_json(folder / "source.receipt.json", {"repo": None, "commit": "local", "files": files})
    return folder


def programs(folder: Path, step: str) -> list[Path]:
    suffix = {"packages": "mlpackage", "compiled": "mlmodelc"}[step]
    return [folder / step / f"{part}.{suffix}" for part in PARTS]


def receipt(path: Path) -> Path:
    return path.with_name(f"{path.stem}.receipt.json")


def make(part: str, output: str, made: Mapping[str, Path]) -> None:
    (made[output] / "inner").mkdir(parents=True)
    (made[output] / "inner/data").write_text(part)


def make_file(path: Path) -> None:
    path.write_text("table")


def written(build: Path) -> dict[str, Any]:
    manifest.run(
        summary=build / "plan.json",
        record=build / "source.receipt.json",
        packages=programs(build, "packages"),
        packaged=[receipt(path) for path in programs(build, "packages")],
        bundles=programs(build, "compiled"),
        compiled=[receipt(path) for path in programs(build, "compiled")],
        table=build / "embedding.safetensors",
        tabled=build / "embedding.receipt.json",
        made=build / "model.json",
        gates=[],
    )
    provenance.run(build / "source.receipt.json", build / "model.json", [], build / "provenance.json")
    content: dict[str, Any] = json.loads((build / "model.json").read_text())
    return content


def described(content: dict[str, Any]) -> dict[str, str]:
    """Every file that model.json names, with its sha256."""
    found = {}
    entries = [
        content["embedding"],
        content["tokenizer"],
        content["texts"],
        *(part["program"] for part in content["parts"]),
    ]
    for entry in (*entries, *content["packages"].values()):
        if "sha256" in entry:
            found[entry["path"]] = entry["sha256"]
        found |= {f"{entry['path']}/{name}": sha for name, sha in entry.get("files", {}).items()}
    return found


def test_every_file_is_named_by_a_relative_path_with_its_hash(build: Path) -> None:
    found = described(written(build))
    expected = {"embedding.safetensors", "source/tokenizer.json", "source/tokenizer_config.json"}
    expected |= {f"packages/{part}.mlpackage/inner/data" for part in PARTS}
    expected |= {f"compiled/{part}.mlmodelc/inner/data" for part in PARTS}
    assert set(found) == expected
    assert all(hashlib.sha256((build / name).read_bytes()).hexdigest() == sha for name, sha in found.items())


def test_what_was_changed_since_is_not_taken_for_what_was_made(build: Path) -> None:
    """The hashes are those of what passed the gates; `shardmill verify` finds the difference."""
    before = described(written(build))
    changed = build / "compiled/head_0.mlmodelc/inner/data"
    changed.unlink()
    changed.write_text("other")
    assert described(written(build)) == before
    assert mismatches(build)[1] == [
        ("compiled/head_0.mlmodelc/inner/data", "not the bytes that model.json names"),
    ]


def test_a_text_that_chat_reads_is_checked_too(build: Path) -> None:
    """A chat template is as much of the model as its weights are."""
    written(build)
    assert mismatches(build) == (mismatches(build)[0], [])
    (build / "source/tokenizer_config.json").write_text("{}")
    assert mismatches(build)[1] == [("source/tokenizer_config.json", "not the bytes that model.json names")]


@pytest.mark.parametrize("fault", ["another model.json", "damaged provenance", "no provenance"])
def test_a_manifest_that_nothing_attests_is_found(build: Path, fault: str) -> None:
    """What model.json itself says has no hash there: the provenance has it."""
    model = written(build)
    match fault:
        case "another model.json":
            write_json(build / "model.json", model | {"eos_token_ids": [1]})
        case "damaged provenance":
            (build / "provenance.json").write_text("{")
        case "no provenance":
            (build / "provenance.json").unlink()
    assert mismatches(build)[1] == [("model.json", "not the bytes that provenance.json names")]


def test_a_verdict_that_was_edited_is_found(build: Path) -> None:
    """What a gate said is attested with the files that it let through."""
    written(build)
    (build / "parity").mkdir()
    (build / "parity/stack.json").write_text("holds")
    sha = hashlib.sha256(b"holds").hexdigest()
    write_json(build / "parity/stack.receipt.json", {"outputs": {"verdict": sha}})
    receipts = [build / "parity/stack.receipt.json"]
    provenance.run(build / "source.receipt.json", build / "model.json", receipts, build / "provenance.json")
    assert mismatches(build)[1] == []
    (build / "parity/stack.json").write_text("holds!")
    assert mismatches(build)[1] == [("parity/stack.json", "not the bytes that provenance.json names")]


def test_a_file_too_many_is_found(build: Path) -> None:
    """What Snakemake leaves in a folder is none."""
    written(build)
    for folder in (programs(build, "compiled")[0], programs(build, "packages")[1]):
        (folder / "inner/more").touch()
    assert mismatches(build)[1] == [
        ("compiled/layers_00_02.mlmodelc/inner/more", "not named by model.json"),
        ("packages/head_0.mlpackage/inner/more", "not named by model.json"),
    ]


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
    plain = ("model", "context", "tokens_max", "widths", "vocab", "rope", "eos_token_ids")
    assert {key: content[key] for key in plain} == {
        "model": "tiny",
        "context": 64,
        "tokens_max": 4,
        "widths": [1, 4],
        "vocab": 256,
        "rope": PLAN["architecture"]["rope"],
        "eos_token_ids": [0],
    }


def test_it_holds_nothing_that_nobody_reads(build: Path) -> None:
    """Beside its format and its origin, for a person."""
    assert set(written(build)) - {"format", "source"} == set(COMPLETE)


def test_it_is_the_same_wherever_it_is_written(build: Path, tmp_path: Path) -> None:
    import shutil

    first = dumps(written(build))
    moved = tmp_path / "another" / "place"
    shutil.copytree(build, moved)
    assert dumps(written(moved)) == first
    assert str(tmp_path) not in first
