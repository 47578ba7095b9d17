"""`shardmill inspect`: tables for a person, JSON for a script."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from shardmill import cli


def shardmill(*arguments: object) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_inspect_prints_tables_and_json(tmp_path: Path) -> None:
    """A person gets names, shapes in brackets and sizes; a script gets the same as JSON."""
    from coremltools.proto import FeatureTypes_pb2, Model_pb2

    spec = Model_pb2.Model(specificationVersion=9)
    function = spec.mlProgram.functions["main"]
    function.opset = "CoreML8"
    function.block_specializations["CoreML8"].operations.add(type="relu")
    array = spec.description.input.add(name="x").type.multiArrayType
    array.dataType, array.shape[:] = FeatureTypes_pb2.ArrayFeatureType.FLOAT16, [1, 96]
    file = tmp_path / ("a long name " * 8) / "m[1].mlmodel"
    file.parent.mkdir()
    file.write_bytes(spec.SerializeToString())

    text = shardmill("inspect", file).stdout
    for expected in ("float16", "[1, 96]", "relu", "no weight files"):
        assert expected in text
    assert text.startswith(f"{file}: ML Program, specification 9, ")  # one line, for who reads lines
    content = json.loads(shardmill("inspect", file, "--json").stdout)
    assert content["functions"][0]["inputs"] == [{"name": "x", "dtype": "float16", "shape": "[1, 96]"}]
