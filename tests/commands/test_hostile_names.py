"""Names of a model's author can not speak to the terminal, whatever command shows them, whatever error has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import portable_coreml.cli
import pytest
from reciter import shardmill

from shardmill.errors import CheckpointError
from shardmill.pipeline.job import error_line

NAME = "\x1b[31mX\x1b]0;evil\x07"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A program whose input, state and operation have such names."""
    from coremltools.proto import FeatureTypes_pb2, Model_pb2

    spec = Model_pb2.Model(specificationVersion=9)
    function = spec.mlProgram.functions["main"]
    function.opset = "CoreML8"
    function.block_specializations["CoreML8"].operations.add(type=f"relu{NAME}")
    for group in (spec.description.input, spec.description.state):
        feature = group.add(name=NAME).type
        array = feature.multiArrayType if group is spec.description.input else feature.stateType.arrayType
        array.dataType, array.shape[:] = FeatureTypes_pb2.ArrayFeatureType.FLOAT32, [1, 30]
    file = tmp_path / "m.mlmodel"
    file.write_bytes(spec.SerializeToString())
    return file


@pytest.mark.parametrize("command", ["inspect", "lint"])
def test_a_command_shows_names_only_as_they_can_be_read(
    hostile: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = shardmill(command, hostile).output
    portable_coreml.cli.main([command, str(hostile)])
    ours, alone = capsys.readouterr()
    for text in (shown, ours + alone):
        assert "?[31mX" in text
        assert all(line.isprintable() for line in text.splitlines()), text


def test_an_error_shows_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wherever it is raised, and whoever wrote its text: commands and jobs end with one printable line."""

    def fail(*_: object) -> Any:
        raise CheckpointError(f"tensor {NAME}\n\ud800")

    monkeypatch.setattr("shardmill.commands.doctor.examine", fail)
    result = shardmill("doctor")
    assert result.output == "shardmill: tensor ?[31mX?]0;evil? ?\n" and result.exit_code == 1
    assert error_line(CheckpointError(f"tensor {NAME}"), tmp_path) == "tensor ?[31mX?]0;evil?"
    assert error_line(ValueError(NAME), tmp_path).isprintable()
