"""Only what changed is worked on: each change to a build, and exactly the steps that it may cost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from safetensors.torch import load_file, save_file

from shardmill import config
from shardmill.errors import ShardmillError
from shardmill.files import read_json, write_json
from shardmill.pipeline import code_digest, why
from shardmill.pipeline.cache import store
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.code_digest import Module

from . import driver

PARITY = {"text": "sample.txt", "positions": 16, "perplexity_positions": 32}
BENCHMARK = {"text": "sample.txt", "tasks": []}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished build of the tiny checkpoint; tests copy it."""
    root = tmp_path_factory.mktemp("first")
    tiny.write_checkpoint(root / "checkpoint")
    (root / "sample.txt").write_text(tiny.sample_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        loosen(patch)
        assert len(driver.run(root, settings())) == 4 + 4 * 5 + 2  # nothing was there before
    return root


@pytest.fixture
def root(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the finished build, with the working directory in it."""
    shutil.copytree(first, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    loosen(monkeypatch)
    yield tmp_path / "copy"


def loosen(patch: pytest.MonkeyPatch) -> None:
    """What INT8 costs a random model of this size is not what these tests are about."""
    from shardmill.gates import by_bits, thresholds

    patch.setattr(by_bits, "COSTS", dict.fromkeys(by_bits.COSTS, {}))
    for name in ("psnr", "kl", "top1_agreement", "perplexity_ratio"):
        patch.setitem(thresholds.THRESHOLDS, name, accepting(thresholds.THRESHOLDS[name]))


def accepting(threshold: Any) -> Any:
    """The threshold with a limit that every number meets."""
    return replace(threshold, limit=-1e9 if threshold.at_least else 1e9)


def settings(**changes: Any) -> dict[str, Any]:
    """The tiny config; three layers parts and two head slices."""
    return tiny.settings("checkpoint", parity=PARITY, **({"benchmark": BENCHMARK} | changes))


def steps_of(*parts: str) -> set[str]:
    """Every step of the parts, from conversion to the gates."""
    return {f"{folder}/{part}" for folder in ("packages", "compiled", "residency", "parity") for part in parts}


def change_tensor(root: Path, name: str) -> None:
    """Adds a little to one tensor of the checkpoint."""
    for file in (root / "checkpoint").glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = tensors[name] * 1.5
            file.unlink()  # a new file: the build's hard link keeps the old bytes
            save_file(tensors, file, metadata={"format": "pt"})


def forecast(root: Path, content: dict[str, Any]) -> set[str]:
    """Steps up to the gates of which `shardmill why` says that they would work or depend on one that would."""
    return {v.step for v in verdicts(root, content) if v.status != "unchanged"} - {"benchmark/speed"}


def verdicts(root: Path, content: dict[str, Any]) -> list[why.StepOutlook]:
    """All that `shardmill why` says."""
    parsed = config.parse(content)
    build = root / "build" / parsed.model
    return why.forecast(parsed, build, Store(root / "build/.store"))


def test_nothing_changed(root: Path) -> None:
    """A second build works on nothing, and `why` says so."""
    assert forecast(root, settings()) == set()
    assert driver.run(root, settings()) == []


def test_what_is_stored_is_known_without_the_build(root: Path) -> None:
    """`why` asks the store: the folder may hold another plan, or be gone; a file that is not fetched is no input."""
    build = root / "build" / config.parse(settings()).model
    plan = build / "plan.json"
    other = plan.read_text().replace(f'"context": {settings()["context"]}', '"context": 32')
    assert other != plan.read_text()
    plan.unlink()
    plan.write_text(other)
    shutil.rmtree(build / "parts")
    assert forecast(root, settings()) == set()
    shutil.rmtree(build)
    (root / "checkpoint/README.md").write_text("A file for people.")
    assert forecast(root, settings()) == set()


def test_a_store_that_may_only_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`why` looks into it and leaves it as it is, also where it hashes an entry anew."""
    for file in (root / "build/.store").glob("*/plan.json"):
        os.utime(file, (1, 1))

    def refuse(path: Path, content: object) -> None:
        if path.is_relative_to(root):
            raise PermissionError(f"{path} may only be read")
        write_json(path, content)

    monkeypatch.setattr(store, "write_json", refuse)
    assert forecast(root, settings()) == set()


def test_one_layer_changed(root: Path) -> None:
    """Only the part with that layer is converted; what comes after it is compared on other hidden states."""
    change_tensor(root, "model.layers.2.mlp.down_proj.weight")
    worked = {"plan", "reference", "expected", "parity/stack", "parity/layers_03_04", "parity/head_0", "parity/head_1"}
    worked |= steps_of("layers_02_03")
    assert forecast(root, settings()) == worked | {"parity/layers_00_02"}  # the new reference is not known yet
    assert set(driver.run(root, settings())) == worked
    assert driver.run(root, settings()) == []


def test_new_commit_without_a_changed_tensor(root: Path) -> None:
    """A file that holds no weight changed: the checkpoint is read again, no program is touched."""
    (root / "checkpoint/generation_config.json").unlink()
    (root / "checkpoint/generation_config.json").write_text('{"eos_token_id": 0}\n')
    assert driver.run(root, settings()) == ["plan"]


@pytest.mark.thorough
def test_topology_there_and_back(root: Path) -> None:
    """Parts whose layers stay together are kept; going back costs nothing."""
    changed = settings(topology=[[0, 3], [3, 4]])
    worked = set(driver.run(root, changed))
    assert {s for s in worked if s.startswith("packages")} == {"packages/layers_00_03"}
    assert worked == {"plan", "expected", "parity/stack"} | steps_of("layers_00_03")
    assert driver.run(root, settings()) == []


def test_benchmark_setting_changed(root: Path) -> None:
    """What is measured later has no part in a package; `why` tells of it, for it takes longest of all."""
    changed = settings(benchmark=BENCHMARK | {"new_tokens": 3})
    assert driver.run(root, changed) == []
    assert verdicts(root, changed)[-1] == why.StepOutlook("benchmark/speed", "works", "not made before")


@pytest.mark.thorough
def test_the_benchmark_is_foreseen(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked up by the model.json that the next build would write, whatever stands in the folder."""
    monkeypatch.setattr("shardmill.bench.speed.benchmark", lambda build, settings: {})
    driver.measure(root, settings())
    (root / "build/tiny/model.json").unlink()
    assert verdicts(root, settings())[-1] == why.StepOutlook("benchmark/speed", "unchanged")
    (last,) = (v for v in verdicts(root, settings(benchmark=BENCHMARK | {"new_tokens": 3})) if v.status != "unchanged")
    assert last == why.StepOutlook("benchmark/speed", "works", "params.settings.new_tokens")
    (root / "sample.txt").write_text("another text" * 99)
    assert verdicts(root, settings())[-1] == why.StepOutlook("benchmark/speed", "depends", "model.json")


def test_converter_changed_with_the_same_bytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another line in the converter converts everything; where the bytes come out the same, nothing after it works."""
    read = code_digest.read_module

    def edited(file: Path) -> Module:
        found = read(file)
        return replace(found, code="edited") if file.parts[-2:] == ("convert", "stamped.py") else found

    monkeypatch.setattr(code_digest, "read_module", edited)
    worked = driver.run(root, settings())
    assert worked == [f"packages/{name}" for name in config.parse(settings()).parts]


def test_second_config_over_the_same_weights(root: Path) -> None:
    """Another model name costs its plan; every artifact is shared."""
    assert driver.run(root, settings(model="other")) == ["plan"]


@pytest.mark.thorough
def test_quantisation_changed(root: Path) -> None:
    """fp16 instead of INT8 is another package each, and no new reference or embedding."""
    worked = set(driver.run(root, settings(convert={"weights": "fp16"})))
    assert worked == {"plan", "precision", "expected", "parity/stack"} | steps_of(*config.parse(settings()).parts)


def test_without_a_store_what_is_in_place_is_unchanged(root: Path) -> None:
    """As for Snakemake: there is nothing to do. What was made of something else, or is gone, would be worked on."""
    shutil.rmtree(root / "build/.store")
    assert forecast(root, settings()) == set()
    (root / "build/tiny/residency/head_0.json").unlink()
    assert forecast(root, settings()) == {"residency/head_0"}
    changed = settings(convert={"weights": "fp16"})
    assert {"plan", *(f"packages/{part}" for part in config.parse(settings()).parts)} <= forecast(root, changed)


def recipe_of(root: Path, **matrices: str) -> dict[str, Any]:
    """A config with a recipe file: INT8, but for layer 2's matrices of these roles."""
    named = {f"layers.2.{role.replace('__', '.')}.weight": form for role, form in matrices.items()}
    write_json(root / "recipe.json", {"schema": 1, "default": "int8", "matrices": named})
    return settings(convert={"precision": "recipe.json"})


@pytest.mark.thorough
def test_the_form_of_one_matrix_changed(root: Path) -> None:
    """It costs the part that holds the matrix, and the stack; and a recipe of INT8 is what INT8 is."""
    assert set(driver.run(root, recipe_of(root))) <= {"plan", "precision"}
    worked = {"plan", "precision", "expected", "parity/stack"} | steps_of("layers_02_03")
    changed = recipe_of(root, mlp__down_proj="int4")
    assert forecast(root, changed) == worked
    assert set(driver.run(root, changed)) == worked
    assert set(driver.run(root, recipe_of(root, mlp__down_proj="int4", self_attn__o_proj="palette6"))) == worked
    assert set(driver.run(root, recipe_of(root))) == set()  # all of it is in the store
    assert not driver.run(root, settings())


@pytest.mark.thorough
def test_the_rule_of_thumb_leaves_the_head_alone(root: Path) -> None:
    """Its matrix stays in INT8, so its programs are those that are there."""
    worked = set(driver.run(root, settings(convert={"precision": "int4"})))
    parts = [part for part in config.parse(settings()).parts if part.startswith("layers")]
    assert worked == {"plan", "precision", "expected", "parity/stack"} | steps_of(*parts)
    assert read_json(root / "build/tiny/parity/layers_02_03.json")["limits"] == "4 bits"
    assert "limits" not in read_json(root / "build/tiny/parity/head_0.json")
    found = read_json(root / "build/tiny/precision.json")
    assert found == {"schema": 1, "default": "int4", "matrices": {"lm_head.weight": "int8"}}


def test_a_recipe_that_was_edited_in_the_build_is_not_followed(root: Path) -> None:
    """It would loosen the gates too, while the config and provenance.json say otherwise."""
    file = root / "build/tiny/precision.json"
    file.unlink()  # it is a link to the store's
    file.write_text(json.dumps({"schema": 1, "default": "int4", "matrices": {}}))
    with pytest.raises(ShardmillError, match=r"precision\.json: not the bytes that were made; remove it and build"):
        driver.run(root, settings(), leave_out={*driver.AFTER, "precision"})  # which nothing has changed for
    file.unlink()
    assert not driver.run(root, settings())


@pytest.mark.thorough
def test_the_table_in_int8(root: Path) -> None:
    """No program knows of it: the table is made again, and the stack compared."""
    changed = settings(convert={"embedding": "int8"})
    assert set(driver.run(root, changed)) == {"plan", "embedding", "expected", "parity/stack"}
    assert driver.run(root, settings()) == []
