"""Programs that take adapters: what coremltools makes, with stacks as inputs, and with the same weights as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import templates
from oracle import convert_plain

from shardmill.convert import package
from shardmill.convert.stamped import convert_stamped
from shardmill.models.interface import ENUMERATED, FIXED, GRAPH, HOST, EntryPoints

from .small import layers_part, write_checkpoint

pytestmark = pytest.mark.usefixtures("unchecked")
FORMS = (EntryPoints(FIXED, (1, 4), GRAPH, (), 8), EntryPoints(ENUMERATED, (1, 4), HOST, (), 3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("stacks") / "checkpoint")


def files(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.thorough
@pytest.mark.parametrize("calls", FORMS, ids=lambda calls: calls.shapes)
def test_a_package_with_adapters_is_what_coremltools_makes(
    checkpoint: Path, tmp_path: Path, calls: EntryPoints
) -> None:
    part = layers_part(checkpoint, 1, 3).changed(calls=calls)
    convert_plain(part, checkpoint, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, checkpoint, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")
    spec = package.load_spec(tmp_path / "stamped.mlpackage")
    described = spec.description.functions[0] if spec.description.functions else spec.description
    shapes = {one.name: tuple(one.type.multiArrayType.shape) for one in described.input}
    assert shapes["adapter_attn"] == (1, 2, 4 * calls.adapters, 64)
    assert shapes["adapter_ffn"] == (1, 2, 3 * calls.adapters, 96)


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [1, 3])
def test_weights_are_those_without_adapters(checkpoint: Path, tmp_path: Path, layers: int) -> None:
    part = layers_part(checkpoint, 1, 1 + layers).changed(calls=EntryPoints(FIXED, (1, 4)))
    other = part.changed(calls=replace(part.spec.calls, adapters=8))
    for name, one in {"plain": part, "adapted": other}.items():
        convert_stamped(one, checkpoint, "int8", tmp_path / f"{name}.mlpackage", templates.FOLDER)
    plain, adapted = (tmp_path / f"{name}.mlpackage" / package.WEIGHT_FILE for name in ("plain", "adapted"))
    assert plain.read_bytes() == adapted.read_bytes()
