"""Canonical packages: the same bytes in every process, nothing of date or place, and still coremltools' own format."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import coremltools as ct
import numpy as np
import portable_coreml
import pytest
import tiny
import torch
from kit_runner.packages import with_default_tokens
from torch.torch_version import TorchVersion

from shardmill import plan
from shardmill.checkpoint.hashing import tree_hash
from shardmill.convert import package, template
from shardmill.convert.stamped import convert_stamped
from shardmill.machine import load_programs_as
from shardmill.runtime.bundles import compile_package

IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from shardmill import plan
from shardmill.convert.stamped import convert_stamped
for part in sys.argv[3:]:
    piece = plan.load_part(Path(part))
    convert_stamped(piece, Path(sys.argv[1]), "int8", Path(sys.argv[2]) / f"{piece.name}.mlpackage", threads=3)
"""


@pytest.mark.thorough
def test_another_process_makes_the_same_bytes(built: tiny.Build, tmp_path: Path) -> None:
    """Under another hash seed, locale and time zone, in another folder, with other threads and new templates."""
    names = ("layers_02_03", "head_1")
    for name in names:
        plan.write_part(tmp_path / f"{name}.json", built.parts[name])
    arguments = [str(built.source), str(tmp_path)]
    arguments += [str(tmp_path / f"{name}.json") for name in names]
    environment = os.environ | {"PYTHONHASHSEED": "4242", "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, *arguments], env=environment, check=True, capture_output=True
    )
    for name in names:
        assert tree_hash(tmp_path / f"{name}.mlpackage") == tree_hash(built.packages[name]), name


def test_another_build_of_torch_makes_the_same_bytes(
    built: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """coremltools writes torch's own version into each program, and every way to install torch has another."""
    monkeypatch.setattr(template, "template", template.template.__wrapped__)  # which keeps templates
    public, found = torch.__version__.partition("+")[0], []
    for build in (public, f"{public}+cpu", f"{public}+cu130"):
        monkeypatch.setattr(torch, "__version__", TorchVersion(build))
        folder = tmp_path / build
        folder.mkdir()
        convert_stamped(built.parts["head_0"], built.source, "int8", folder / "head_0.mlpackage")
        with load_programs_as("fp16"):
            compile_package(folder / "head_0.mlpackage", folder / "head_0.mlmodelc")
        notes = package.load_spec(folder / "head_0.mlpackage").description.metadata.userDefined
        assert notes[package.TRACER] == f"torch=={public}"
        found.append(tree_hash(folder))
    assert len(set(found)) == 1


def test_parts_of_the_same_shape_differ_by_more_than_a_name(built: tiny.Build) -> None:
    """The test above would pass if a package held nothing of its part."""
    assert tree_hash(built.packages["head_0"]) != tree_hash(built.packages["head_1"])
    assert tree_hash(built.packages["layers_02_03"]) != tree_hash(built.packages["layers_03_04"])


@pytest.mark.parametrize("name", ["layers_00_02", "head_0"])
def test_nothing_tells_when_or_where_it_was_made(built: tiny.Build, name: str) -> None:
    folder = built.packages[name]
    for file in folder.rglob("*"):
        content = b"" if file.is_dir() or file.name == "weight.bin" else file.read_bytes()
        for word in (
            os.fsencode(folder.parent),
            os.fsencode(Path.home()),
            os.uname().nodename.encode(),
            b"/site-packages",
        ):
            assert word not in content, (file, word)
        assert not re.search(rb"20\d\d-\d\d-\d\d", content), file
        assert b"conversion_date" not in content
    modes = {stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*") if file.is_file()}
    assert modes == {0o644}


def test_manifests_name_their_entries_after_the_content(built: tiny.Build) -> None:
    one, other = (json.loads((built.packages[n] / "Manifest.json").read_text()) for n in ("head_0", "layers_00_02"))
    assert one == other  # the same files, so the same identifiers
    assert one["rootModelIdentifier"] in one["itemInfoEntries"]
    assert one["itemInfoEntries"][one["rootModelIdentifier"]]["path"] == "com.apple.CoreML/model.mlmodel"


def predicted(path: Path) -> np.ndarray:
    portable_coreml.install(precision="fp32")
    model = ct.models.MLModel(str(path), compute_units=ct.ComputeUnit.CPU_AND_NE)
    x = np.random.default_rng(0).standard_normal((1, tiny.HIDDEN, 3, 1)).astype(np.float32)
    result: np.ndarray = model.predict({"hidden": x})["logits"]
    return result


def test_coremltools_loads_and_saves_it_again(built: tiny.Build, tmp_path: Path) -> None:
    path = built.packages["head_0"]
    ct.models.MLModel(str(path), skip_model_load=True).save(str(tmp_path / "again.mlpackage"))
    assert np.array_equal(predicted(tmp_path / "again.mlpackage"), predicted(path))


def test_loading_leaves_its_bytes_alone(built: tiny.Build) -> None:
    before = tree_hash(built.packages["head_0"])
    predicted(built.packages["head_0"])
    assert tree_hash(built.packages["head_0"]) == before


def test_another_default_changes_only_the_default_shapes(built: tiny.Build, tmp_path: Path) -> None:
    path, copy = built.packages["layers_02_03"], tmp_path / "copy.mlpackage"
    before = tree_hash(path)
    with_default_tokens(path, copy, 4)
    assert tree_hash(path) == before
    old, new = package.load_spec(path), package.load_spec(copy)
    shapes = {f.name: tuple(f.type.multiArrayType.shape) for f in new.description.input}
    assert shapes == {
        "x": (1, 96, 4, 1),
        "rope_cos": (4, 12),
        "rope_sin": (4, 12),
        "attn_mask": (1, 1, 4, 64),
        "kv_write_mask": (1, 1, 64, 4),
    }
    for one, other in zip(old.description.input, new.description.input, strict=True):
        assert one.type.multiArrayType.shapeRange == other.type.multiArrayType.shapeRange
        other.type.multiArrayType.ClearField("shape")
        other.type.multiArrayType.shape.extend(one.type.multiArrayType.shape)
    assert new == old
    weights = Path("Data/com.apple.CoreML/weights/weight.bin")
    assert (copy / weights).read_bytes() == (path / weights).read_bytes()
    ct.models.MLModel(str(copy), skip_model_load=True)


def test_a_changed_default_of_a_store_s_package_leaves_the_store_alone(built: tiny.Build, tmp_path: Path) -> None:
    """Its files are hard links that several builds share, and read-only."""
    import shutil

    shutil.copytree(built.packages["head_0"], tmp_path / "stored.mlpackage")
    for file in (tmp_path / "stored.mlpackage").rglob("*"):
        if file.is_file():
            file.chmod(0o444)
    before = tree_hash(tmp_path / "stored.mlpackage")
    with_default_tokens(tmp_path / "stored.mlpackage", tmp_path / "copy.mlpackage", 4)
    assert tree_hash(tmp_path / "stored.mlpackage") == before != tree_hash(tmp_path / "copy.mlpackage")
