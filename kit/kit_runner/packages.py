"""Copies of a package: with another default shape, with a single function, or cut after an operation."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

ONLY = "main"  # name of a package's only function
MODEL_FILE = Path("Data/com.apple.CoreML/model.mlmodel")
# MIL's tensor types that Core ML accepts as outputs, each with its feature type (FeatureTypes.proto).
OUTPUTS = {10: 65552, 11: 65568, 23: 131104}  # float16, float32, int32


def with_default_tokens(source: Path, target: Path, tokens: int) -> None:
    """Copy a package so that its flexible inputs default to T = `tokens`.

    A compute plan describes the default shape only, so the plan for another T needs such a copy.
    """
    spec = _copied(source, target)
    for feature in spec.description.input:
        array = feature.type.multiArrayType
        for axis, bounds in enumerate(array.shapeRange.sizeRanges):
            if bounds.upperBound != bounds.lowerBound:
                array.shape[axis] = tokens
        listed = [list(one.shape) for one in array.enumeratedShapes.shapes]
        for axis in range(len(array.shape)):
            if len({shape[axis] for shape in listed}) > 1:
                array.shape[axis] = tokens
    (target / MODEL_FILE).write_bytes(spec.SerializeToString(deterministic=True))


def with_one_function(source: Path, target: Path, name: str) -> None:
    """Copy a package so that its only function is the given one, named ONLY in the copy."""
    spec = _alone(_copied(source, target), name)
    (target / MODEL_FILE).write_bytes(spec.SerializeToString(deterministic=True))


def operations(package: Path, function: str | None = None) -> list[tuple[str, str]]:
    """Return type and first output of each operation of a function, or of the only one; constants are included."""
    block = _block(_alone(_read(package), function))
    return [(op.type, op.outputs[0].name if op.outputs else "") for op in block.operations]


def cut_after(source: Path, target: Path, place: int, function: str | None = None) -> None:
    """Copy a package so that its program ends after the operation at `place`.

    The outputs are all results before the cut that operations after it would use, so that nothing before the cut can be
    dropped as unused. If there are several functions, only `function` is kept.
    """
    spec = _alone(_copied(source, target), function)
    block = _block(spec)
    before, rest = list(block.operations[: place + 1]), list(block.operations[place + 1 :])
    later = {binding.name for op in rest for argument in op.inputs.values() for binding in argument.arguments}
    later |= {*block.outputs, before[-1].outputs[0].name if before[-1].outputs else ""}
    ends = [out for op in before if not op.type.startswith("const") for out in op.outputs if out.name in later]
    ends = [out for out in ends if out.type.tensorType.dataType in OUTPUTS]
    del block.operations[place + 1 :]
    del block.outputs[:]
    block.outputs.extend(out.name for out in ends)
    del spec.description.output[:]
    for out in ends:
        feature = spec.description.output.add()
        feature.name = out.name
        array = feature.type.multiArrayType
        array.dataType = OUTPUTS[out.type.tensorType.dataType]
        sizes = [d.constant.size if d.HasField("constant") else 0 for d in out.type.tensorType.dimensions]
        if all(sizes):
            array.shape.extend(sizes)
    (target / MODEL_FILE).write_bytes(spec.SerializeToString(deterministic=True))


def _copied(source: Path, target: Path) -> Any:
    """Hard-link a package's files to another place, except the program; return the program."""
    shutil.copytree(source, target, copy_function=link)
    (target / MODEL_FILE).unlink()
    return _read(source)


def link(source: str, target: str) -> None:
    """Give a file another name, or copy it to another disk."""
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)


def _read(package: Path) -> Any:
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((package / MODEL_FILE).read_bytes())
    return spec


def _alone(spec: Any, name: str | None) -> Any:
    """Return a specification with only one of its functions, named ONLY."""
    if name is None:
        return spec
    alone, described = type(spec)(), next(one for one in spec.description.functions if one.name == name)
    alone.specificationVersion = spec.specificationVersion
    for field in ("input", "output", "state"):
        getattr(alone.description, field).extend(getattr(described, field))
    alone.mlProgram.version = spec.mlProgram.version
    alone.mlProgram.functions[ONLY].CopyFrom(spec.mlProgram.functions[name])
    return alone


def _block(spec: Any) -> Any:
    """Return the block of operations of the only function."""
    (function,) = spec.mlProgram.functions.values()
    return function.block_specializations[function.opset]
