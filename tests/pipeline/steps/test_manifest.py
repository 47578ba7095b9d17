"""model.json: relative paths, the hashes of what was made, and nothing that Snakemake left lying about."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.errors import ShardmillError
from shardmill.files import dumps
from shardmill.pipeline.steps import manifest
from shardmill.runtime.manifest import COMPLETE, entries, read_manifest

from ..made import PARTS, judge, write_parts, written
from ..made_forms import ROPE


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
        "rope": ROPE,
        "eos_token_ids": [0],
    }


def test_it_holds_nothing_that_nobody_reads(build: Path) -> None:
    """Beside its format and its origin, for a person."""
    told = {"format", "source", "window", "verify", "reshape_frequency", "uses", "expected"}
    assert set(written(build)) - told == set(COMPLETE)


def test_it_is_the_same_wherever_it_is_written(build: Path, tmp_path: Path) -> None:
    import shutil

    first = dumps(written(build))
    moved = tmp_path / "another" / "place"
    shutil.copytree(build, moved)
    assert dumps(written(moved)) == first
    assert str(tmp_path) not in first


def test_every_entry_says_how_many_bytes_it_has(build: Path) -> None:
    content = written(build)
    for entry in entries(content):
        path, names = build / entry["path"], entry.get("files", {})
        assert entry["bytes"] == (sum((path / name).stat().st_size for name in names) or path.stat().st_size) > 0


def specify(build: Path, *versions: int) -> list[manifest.Artifact]:
    """Packages of specification versions."""
    made = []
    for place, version in enumerate(versions):
        package = build / f"{place}.mlpackage"
        package.mkdir()
        (package / "model.mlmodel").write_bytes(bytes([8, version, 18, 0]))
        made.append(manifest.Artifact(package, "", {"model.mlmodel": "0" * 64}))
    return made


def test_the_oldest_system_is_that_of_the_newest_package(tmp_path: Path) -> None:
    assert manifest._requires(specify(tmp_path, 9, 9)) == {"requires": {"macos": "15.0", "ios": "18.0"}}
    (tmp_path / "b").mkdir()
    assert manifest._requires(specify(tmp_path / "b", 9, 10)) == {"requires": {"macos": "26.0", "ios": "26.0"}}
    (tmp_path / "c").mkdir()
    assert manifest._requires(specify(tmp_path / "c", 9, 99)) == {}


SAID: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing": ({}, {}),
    "no object": ([], {}),
    "greedy": ({"do_sample": False, "temperature": 0.7}, {}),
    "only that": ({"do_sample": True}, {"sampling": {"temperature": 1.0}}),
    "all": (
        {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1, "min_p": 0},
        {"sampling": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1, "min_p": 0}},
    ),
    "nonsense": (
        {"do_sample": True, "temperature": "hot", "top_p": 7, "top_k": 1.5, "min_p": True},
        {"sampling": {"temperature": 1.0}},
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_how_to_sample_is_what_the_checkpoint_says(tmp_path: Path, name: str) -> None:
    said, found = SAID[name]
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert manifest._sampling(tmp_path) == found


def test_a_proven_chat_format_is_written_without_known_stop_tokens(
    build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"begin": "", "user": {"before": "", "after": ""}, "assistant": {"before": "", "after": ""}, "generate": ""}
    monkeypatch.setattr(manifest, "has_template", lambda source: True)
    for stop, written_stop in (([0], []), ([5], [5]), ([256], []), ([], [])):
        monkeypatch.setattr(manifest, "chat_format", lambda source, stop=stop: ({"chat": plain | {"stop": stop}}, ""))
        assert written(build)["chat"] == plain | {"stop": written_stop}
        assert read_manifest(build)["chat"]["stop"] == written_stop
    monkeypatch.setattr(manifest, "chat_format", lambda source: ({}, "it writes the date"))
    assert "chat" not in written(build)
