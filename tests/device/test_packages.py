"""A program that is cut off is the front of the whole one: it loads and runs wherever that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import portable_coreml
import pytest
import templates
import tiny
from kit_runner.packages import cut_after, operations
from kit_runner.runner import layer_at, search
from portable_coreml.proxy import MLModelProxy

from shardmill.checkpoint.hashing import tree_hash
from shardmill.convert.package import load_spec
from shardmill.convert.stamped import convert_stamped
from shardmill.machine import is_portable
from shardmill.models.interface import FIXED, EntryPoints

pytestmark = pytest.mark.skipif(not is_portable(), reason="looks into the portable engine, which is not on a Mac")
WIDTH = 2


def inputs(width: int) -> dict[str, Any]:
    """Random numbers for a part of layers, and masks that let it see what it has just written."""
    rng = np.random.default_rng(3)
    shapes = {
        "x": (1, tiny.HIDDEN, width, 1),
        "rope_cos": (width, tiny.ROPE_DIM // 2),
        "rope_sin": (width, tiny.ROPE_DIM // 2),
    }
    found = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    write = np.zeros((1, 1, tiny.CONTEXT, width), np.float32)
    write[0, 0, np.arange(width), np.arange(width)] = 1
    seen = np.arange(tiny.CONTEXT) <= np.arange(width)[:, None]
    return found | {"attn_mask": np.where(seen, 0, -1e4)[None, None].astype(np.float32), "kv_write_mask": write}


def places(found: list[tuple[str, str]]) -> list[int]:
    """Where a program may be cut."""
    return [place for place, (kind, output) in enumerate(found) if output and not kind.startswith("const")]


def run(package: Path) -> dict[str, Any]:
    model = MLModelProxy(str(package))
    return model.predict(inputs(WIDTH), model.newState())


@pytest.mark.usefixtures("fp32")
def test_cut_anywhere_it_compiles_and_runs(built: tiny.Build, tmp_path: Path) -> None:
    package = built.packages["layers_02_03"]
    before, whole = tree_hash(package), run(package)["hidden"]
    found = operations(package)
    for place in [*places(found)[::9], places(found)[-1]]:
        cut = tmp_path / f"{place}.mlpackage"
        cut_after(package, cut, place)
        bundle = ct.models.utils.compile_model(str(cut), str(tmp_path / f"{place}.mlmodelc"))
        outputs = run(Path(bundle))
        assert outputs and all(np.isfinite(value).all() for value in outputs.values()), found[place]
    assert np.array_equal(outputs["hidden"], whole)
    assert tree_hash(package) == before


def test_nothing_in_front_of_a_cut_is_left_without_use(built: tiny.Build, tmp_path: Path) -> None:
    """Else an engine would leave out the very operation that is looked for, as nothing needs it."""
    package = built.packages["layers_02_03"]
    for place in places(operations(package))[::9]:
        cut_after(package, tmp_path / f"{place}.mlpackage", place)
        (function,) = load_spec(tmp_path / f"{place}.mlpackage").mlProgram.functions.values()
        block = function.block_specializations[function.opset]
        used = {b.name for op in block.operations for argument in op.inputs.values() for b in argument.arguments}
        used |= set(block.outputs)
        made = [out.name for op in block.operations if not op.type.startswith("const") for out in op.outputs]
        assert block.operations[-1].outputs[0].name in block.outputs
        assert [name for name in made if name not in used] == []


@pytest.mark.parametrize("culprit", [0, 1, 40, -2, -1])
def test_the_search_finds_the_operation_that_an_engine_refuses(
    built: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, culprit: int
) -> None:
    """On the portable engine itself, which is made to refuse one operation."""
    package = built.packages["layers_02_03"]
    found = operations(package)
    able = places(found)
    refused = found[able[culprit]][1]
    portable_coreml.install(precision="fp32")

    def fails(place: int) -> bool:
        cut = tmp_path / f"{place}.mlpackage"
        cut_after(package, cut, place)
        model = MLModelProxy(str(cut))
        return refused in {out.name for op in model._executable.function.block.walk() for out in op.outputs}

    assert search(able, fails) == able[culprit]


def test_the_search_takes_few_probes() -> None:
    tried: list[int] = []

    def fails(place: int) -> bool:
        tried.append(place)
        return place >= 7000

    assert search(list(range(0, 10000, 2)), fails) == 7000
    assert len(tried) <= 13


def test_the_last_place_is_probed_too() -> None:
    """A program may fail whose every cut loads; then no operation is the culprit."""
    tried: list[int] = []
    assert search([3, 5, 8], lambda place: bool(tried.append(place))) is None
    assert 8 in tried
    assert search([3, 5, 8], lambda place: place == 8) == 8


def test_layers_are_told_by_where_they_begin() -> None:
    names, layers = ["a", "b", "c", "d", "e"], [("b", 4), ("d", 5)]
    assert [layer_at(place, names, layers) for place in range(5)] == [None, 4, 4, 5, 5]


@pytest.mark.usefixtures("fp32")
def test_one_of_several_functions_is_cut_off_by_itself(built: tiny.Build, tmp_path: Path) -> None:
    """It stays as the only one, with its own shapes, and gives what it gave."""
    part = built.parts["layers_02_03"].changed(calls=EntryPoints(FIXED, (1, WIDTH)))
    package, cut = tmp_path / "both.mlpackage", tmp_path / "cut.mlpackage"
    convert_stamped(part, built.source, "int8", package, templates.FOLDER)
    found = operations(package, f"t{WIDTH}")
    assert len(found) > 50 and len(operations(package, "t1")) > 50
    cut_after(package, cut, len(found) - 1, f"t{WIDTH}")
    assert [*load_spec(cut).mlProgram.functions] == ["main"]
    whole = MLModelProxy(str(package), function_name=f"t{WIDTH}")
    np.testing.assert_array_equal(run(cut)["hidden"], whole.predict(inputs(WIDTH), whole.newState())["hidden"])
