"""Programs without states, and those of enumerated shapes: what coremltools makes, stamped or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import templates
import torch
from oracle import convert_plain

from shardmill.convert import package
from shardmill.convert.stamped import convert_stamped
from shardmill.models.interface import ENUMERATED, FIXED, HOST, RANGE, EntryPoints
from shardmill.models.part_kinds import constants
from shardmill.models.parts import build

from .small import draft, head_part, layers_part, write_checkpoint, write_family

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hosted") / "checkpoint")


def files(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.thorough(but=["enumerated"])
@pytest.mark.parametrize(
    "calls", [EntryPoints(ENUMERATED, (1, 4), HOST), EntryPoints(FIXED, (1, 4), HOST)], ids=lambda c: c.shapes
)
def test_stamped_packages_are_plain_ones(checkpoint: Path, tmp_path: Path, calls: EntryPoints) -> None:
    part = layers_part(checkpoint, 1, 3).changed(calls=calls)
    convert_plain(part, checkpoint, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, checkpoint, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")
    spec = package.load_spec(tmp_path / "stamped.mlpackage")
    described = spec.description.functions[0] if spec.description.functions else spec.description
    assert not described.state
    assert [one.name for one in described.output] == ["hidden", "k_1_new", "v_1_new", "k_2_new", "v_2_new"]
    assert [one.name for one in described.input][-4:] == ["k_1", "v_1", "k_2", "v_2"]


def test_layers_of_several_kinds_give_what_is_new_to_each(tmp_path: Path) -> None:
    """Rings of convolutions beside keys and values."""
    source = write_family(tmp_path / "checkpoint", "lfm2")
    part = draft(source, [[0, 2], [2, 4]])["layers_00_02"].changed(calls=EntryPoints(RANGE, (), HOST))
    convert_plain(part, source, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, source, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")


def test_enumerated_shapes_are_described_as_coremltools_describes_them(checkpoint: Path, tmp_path: Path) -> None:
    """Of a program with one input it can convert them itself."""
    part = head_part(checkpoint, 32, 64).changed(calls=EntryPoints(ENUMERATED, (1, 4), HOST))
    convert_stamped(part, checkpoint, "fp16", tmp_path / "ours.mlpackage", templates.FOLDER)
    weights = {path: torch.rand(shape) for path, shape in constants(part.spec).items()}
    hidden = part.spec.graph.hidden
    traced = torch.jit.trace(build(part.spec, weights), torch.zeros(1, hidden, 4, 1), check_trace=False)
    shapes = ct.EnumeratedShapes([(1, hidden, 1, 1), (1, hidden, 4, 1)], default=(1, hidden, 1, 1))
    theirs = ct.convert(
        traced,
        inputs=[ct.TensorType("hidden", shapes, np.float16)],
        outputs=[ct.TensorType("logits", dtype=np.float16)],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    ).get_spec()
    ours: Any = package.load_spec(tmp_path / "ours.mlpackage")
    assert list(ours.description.input) == list(theirs.description.input)
    assert list(ours.description.output) == list(theirs.description.output)
    taken = [spec.mlProgram.functions["main"].inputs[0] for spec in (ours, theirs)]
    assert taken[0] == taken[1]
