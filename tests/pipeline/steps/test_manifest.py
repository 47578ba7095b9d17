"""model.json: relative paths, the hashes of what was made, and nothing that Snakemake left lying about."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from shardmill.errors import ShardmillError
from shardmill.files import dumps
from shardmill.runtime.manifest import COMPLETE

from ..made import PARTS, PLAN, judge, write_parts, written


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A build that has passed its gates."""
    folder = write_parts(tmp_path / "build")
    judge(folder)
    return folder


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
    expected = {"embedding.safetensors", "source/config.json", "source/tokenizer.json", "source/tokenizer_config.json"}
    expected |= {f"packages/{part}.mlpackage/inner/data" for part in PARTS}
    expected |= {f"compiled/{part}.mlmodelc/inner/data" for part in PARTS}
    assert set(found) == expected
    assert all(hashlib.sha256((build / name).read_bytes()).hexdigest() == sha for name, sha in found.items())


@pytest.mark.parametrize(
    ("file", "remade"),
    [
        ("compiled/head_0.mlmodelc/inner/data", "compiled/head_0.mlmodelc"),
        ("embedding.safetensors", "embedding.safetensors"),
        ("source/tokenizer_config.json", "source.receipt.json"),
    ],
)
@pytest.mark.parametrize("fault", ["changed", "gone"])
def test_what_is_not_what_was_judged_gets_no_manifest(build: Path, file: str, remade: str, fault: str) -> None:
    """The gates' receipts stand by the hashes of what was made: they do not see a disk that rots."""
    (build / file).unlink()
    if fault == "changed":
        (build / file).write_text("other")
    with pytest.raises(ShardmillError) as caught:
        written(build)
    assert f"{build / file}: not the file" in str(caught.value) and f"remove {build / remade} and" in str(caught.value)
    assert not (build / "model.json").exists()


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
    plain = ("model", "context", "tokens_max", "widths", "verify", "vocab", "rope", "eos_token_ids")
    assert {key: content[key] for key in plain} == {
        "model": "tiny",
        "context": 64,
        "tokens_max": 4,
        "widths": [1, 4],
        "verify": 4,
        "vocab": 256,
        "rope": PLAN["architecture"]["ropes"],
        "eos_token_ids": [0],
    }


def test_it_holds_nothing_that_nobody_reads(build: Path) -> None:
    """Beside its format and its origin, for a person."""
    assert set(written(build)) - {"format", "source", "window", "verify", "reshape_frequency"} == set(COMPLETE)


def test_it_is_the_same_wherever_it_is_written(build: Path, tmp_path: Path) -> None:
    import shutil

    first = dumps(written(build))
    moved = tmp_path / "another" / "place"
    shutil.copytree(build, moved)
    assert dumps(written(moved)) == first
    assert str(tmp_path) not in first
