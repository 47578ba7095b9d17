"""Contents: what is said of a package is what was put into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from portable_coreml.errors import ProgramError
from portable_coreml.files import compare
from portable_coreml.files.compare import ShownFeature, Weights


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stateful program as coremltools saves it, with an int8 weight and a float16 one that two operations use."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    plain = np.linspace(-1, 1, 64 * 32).reshape(64, 32).astype(np.float16)
    quantized = np.arange(-64, 64).repeat(16).reshape(64, 32).astype(np.int8)
    specs = [mb.TensorSpec((1, 64), types.fp16), mb.StateTensorSpec((1, 32), types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)  # type: ignore[untyped-decorator]
    def program(x: Any, memory: Any) -> Any:
        weight = mb.const(val=plain, name="plain")
        scaled = mb.constexpr_blockwise_shift_scale(data=quantized, scale=np.full((64, 1), 0.5, np.float16))
        both = mb.add(x=mb.matmul(x=x, y=weight), y=mb.matmul(x=x, y=scaled))
        again = mb.matmul(x=mb.relu(x=x), y=weight)
        total = mb.add(x=mb.add(x=both, y=again), y=mb.read_state(input=memory))
        mb.coreml_update_state(state=memory, value=total)
        return mb.relu(x=total, name="out")

    model = ct.convert(program, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    path = tmp_path_factory.mktemp("package") / "small.mlpackage"
    model.save(str(path))
    return path


def test_reads_what_coremltools_saved(package: Path) -> None:
    """Inputs, outputs, states, operations and weights of a real package are those of the program."""
    found = compare.read_contents(package)
    (function,) = found.functions
    assert (function.name, function.opset) == ("main", "CoreML8")
    assert function.inputs == (ShownFeature("x", "float16", "[1, 64]"),)
    assert [feature.name for feature in function.outputs] == ["out"]
    assert function.states == (ShownFeature("memory", "float16", "[1, 32]"),)
    counts = dict(function.operations)
    assert (counts["matmul"], counts["add"], counts["relu"], counts["write_state"]) == (3, 3, 2, 1)
    # 64 x 32 int8 values; as many float16, once though used twice, and the 64 scales.
    assert found.weights == (
        Weights("float16", 2, 64 * 32 + 64, 2 * (64 * 32 + 64)),
        Weights("int8", 1, 64 * 32, 64 * 32),
    )
    assert found.bytes == sum(file.stat().st_size for file in package.rglob("*") if file.is_file())


def write_model(path: Path, build: Any) -> Path:
    """A .mlmodel with one empty function `main`, changed by build(spec, block)."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model(specificationVersion=9)
    function = spec.mlProgram.functions["main"]
    function.opset = "CoreML8"
    build(spec, function.block_specializations["CoreML8"])
    path.write_bytes(spec.SerializeToString())
    return path


def add_operation(block: Any, kind: str, dtype: str = "", shape: tuple[int, ...] = (), offset: int = 64) -> Any:
    """An operation; with a dtype, one whose value lies in a weight file."""
    from coremltools.proto import MIL_pb2

    op = block.operations.add(type=kind)
    if dtype:
        value = op.attributes["val"]
        value.type.tensorType.dataType = MIL_pb2.DataType.Value(dtype)
        for size in shape:
            value.type.tensorType.dimensions.add().constant.size = size
        value.blobFileValue.fileName, value.blobFileValue.offset = "@model_path/weights/weight.bin", offset
    return op


def test_weights_of_every_width(tmp_path: Path) -> None:
    """Sub-byte types take what they take, rounded up per tensor, and one place in a file counts once."""

    def build(_: Any, block: Any) -> None:
        add_operation(block, "const", "INT4", (3, 3), 64)
        add_operation(block, "const", "INT4", (3, 3), 128)
        add_operation(block, "const", "INT4", (3, 3), 128)
        add_operation(block, "const", "UINT3", (8,), 192)
        add_operation(block, "const", "BOOL", (7,), 256)
        add_operation(block, "const", "BFLOAT16", (5,), 320)

    rows = compare.read_contents(write_model(tmp_path / "m.mlmodel", build)).weights
    assert rows == (
        Weights("bfloat16", 1, 5, 10),
        Weights("int4", 2, 18, 10),
        Weights("bool", 1, 7, 7),
        Weights("uint3", 1, 8, 3),
    )


def test_weights_that_are_arguments(tmp_path: Path) -> None:
    """A weight given as an operation's input value, without a const of its own, is found too."""

    def build(_: Any, block: Any) -> None:
        add_operation(block, "conv")
        value = add_operation(block, "const", "FLOAT16", (4,)).attributes["val"]
        block.operations[0].inputs["weight"].arguments.add().value.CopyFrom(value)
        del block.operations[1]

    found = compare.read_contents(write_model(tmp_path / "m.mlmodel", build))
    assert found.weights == (Weights("float16", 1, 4, 8),)
    assert found.functions[0].operations == (("conv", 1),)


def test_operations_in_nested_blocks_count(tmp_path: Path) -> None:
    """The branches of a cond are part of the histogram, and the most frequent operation comes first."""

    def build(_: Any, block: Any) -> None:
        cond = add_operation(block, "cond")
        for _branch in range(2):
            add_operation(cond.blocks.add(), "relu")

    (function,) = compare.read_contents(write_model(tmp_path / "m.mlmodel", build)).functions
    assert function.operations == (("relu", 2), ("cond", 1))


def test_flexible_shapes(tmp_path: Path) -> None:
    """Ranges, open ranges and enumerated shapes are told apart, and a shape that is not declared is not called []."""
    from coremltools.proto import FeatureTypes_pb2

    def build(spec: Any, _: Any) -> None:
        arrays = {}
        for name in ("ranged", "listed", "free"):
            feature = spec.description.input.add(name=name)
            arrays[name] = feature.type.multiArrayType
            arrays[name].dataType = FeatureTypes_pb2.ArrayFeatureType.FLOAT16
        for low, high in ((1, 1), (1, 4), (2, -1)):
            arrays["ranged"].shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
        for size in (1, 4):
            arrays["listed"].enumeratedShapes.shapes.add(shape=[1, size])

    (function,) = compare.read_contents(write_model(tmp_path / "m.mlmodel", build)).functions
    assert [feature.shape for feature in function.inputs] == ["[1, 1..4, 2..]", "[1, 1] | [1, 4]", "not declared"]


def test_several_functions(tmp_path: Path) -> None:
    """Each function of a multifunction model comes with its own inputs."""

    def build(spec: Any, _: Any) -> None:
        spec.mlProgram.functions["other"].opset = "CoreML8"
        add_operation(spec.mlProgram.functions["other"].block_specializations["CoreML8"], "relu")
        for name in ("main", "other"):
            spec.description.functions.add(name=name).input.add(name=f"of_{name}").type.stringType.SetInParent()

    found = compare.read_contents(write_model(tmp_path / "m.mlmodel", build))
    assert [(f.name, f.inputs[0], len(f.operations)) for f in found.functions] == [
        ("main", ShownFeature("of_main", "string", ""), 0),
        ("other", ShownFeature("of_other", "string", ""), 1),
    ]


def damaged(folder: Path, name: str) -> Path:
    """Something at a path that is not a readable ML Program."""
    path = folder / "broken.mlpackage"
    entries = {"id": {"path": "com.apple.CoreML/model.mlmodel"}}
    if name == "missing":
        return path
    if name == "compiled":
        (folder / "x.mlmodelc").mkdir()
        return folder / "x.mlmodelc"
    path.mkdir()
    if name == "no JSON":
        (path / "Manifest.json").write_text("{")
    if name == "no root":
        (path / "Manifest.json").write_text(json.dumps({"itemInfoEntries": entries}))
    if name in ("no model", "garbage", "another kind", "a number that is no type"):
        (path / "Manifest.json").write_text(json.dumps({"itemInfoEntries": entries, "rootModelIdentifier": "id"}))
    if name == "garbage":
        (path / "Data/com.apple.CoreML").mkdir(parents=True)
        (path / "Data/com.apple.CoreML/model.mlmodel").write_bytes(b"\xff" * 64)
    if name in ("another kind", "a number that is no type"):
        from coremltools.proto import Model_pb2

        (path / "Data/com.apple.CoreML").mkdir(parents=True)
        spec = Model_pb2.Model()
        if name == "another kind":
            spec.neuralNetwork.SetInParent()
        else:
            spec.mlProgram.functions["main"].opset = "CoreML8"
            spec.description.input.add(name="x").type.multiArrayType.dataType = 4096
        (path / "Data/com.apple.CoreML/model.mlmodel").write_bytes(spec.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("missing", "no such file or folder"),
        ("compiled", "a compiled model; inspect the .mlpackage"),
        ("no manifest", "not an .mlpackage: it has no Manifest.json"),
        ("no JSON", "Manifest.json: damaged: not JSON"),
        ("no root", "damaged: it does not say where the model is"),
        ("no model", "model.mlmodel: can't be read: No such file"),
        ("garbage", "damaged, or not a Core ML model"),
        ("another kind", "a model of type neuralNetwork; the portable engine runs ML Programs only"),
        ("a number that is no type", "damaged: .*4096"),
    ],
)
def test_what_is_no_program_is_one_line(tmp_path: Path, name: str, expected: str) -> None:
    """Whatever else lies at the path is named in one line, without a traceback of protobuf or json."""
    path = damaged(tmp_path, name)
    with pytest.raises(ProgramError, match=expected) as caught:
        compare.read_contents(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
