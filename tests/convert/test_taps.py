"""Hidden states that other programs read: further outputs of a part of layers, and nothing else in its program."""

from __future__ import annotations

from pathlib import Path

import pytest
import templates
from oracle import convert_plain

from shardmill.convert import package
from shardmill.convert.stamped import convert_stamped
from shardmill.models.interface import ENUMERATED, FIXED, HOST, EntryPoints

from .small import layers_part, write_checkpoint

pytestmark = pytest.mark.usefixtures("unchecked")
CALLS = (EntryPoints(), EntryPoints(FIXED, (1, 4)), EntryPoints(ENUMERATED, (1, 4), HOST))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("taps") / "checkpoint")


def files(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.thorough(but=["range"])
@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.shapes)
def test_a_tapped_package_is_what_coremltools_makes(checkpoint: Path, tmp_path: Path, calls: EntryPoints) -> None:
    part = layers_part(checkpoint, 1, 4).changed(calls=calls, taps=(2, 3))
    convert_plain(part, checkpoint, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, checkpoint, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")
    spec = package.load_spec(tmp_path / "stamped.mlpackage")
    described = spec.description.functions[0] if spec.description.functions else spec.description
    names = [one.name for one in described.output]
    assert (names[0], names[-2:]) == ("hidden", ["tap_2", "tap_3"])


def test_weights_of_a_tapped_package_are_those_without_taps(checkpoint: Path, tmp_path: Path) -> None:
    part = layers_part(checkpoint, 1, 4)
    convert_stamped(part, checkpoint, "int8", tmp_path / "plain.mlpackage", templates.FOLDER)
    convert_stamped(part.changed(taps=(2,)), checkpoint, "int8", tmp_path / "tapped.mlpackage", templates.FOLDER)
    assert (tmp_path / "plain.mlpackage" / package.WEIGHT_FILE).read_bytes() == (
        tmp_path / "tapped.mlpackage" / package.WEIGHT_FILE
    ).read_bytes()
