"""A package: its files, its program as protobuf, and the canonical form in which every machine writes the same bytes.

coremltools writes a conversion date, the build of torch (2.13.0+cpu), random identifiers into the manifest, and
protobuf maps in the order of a hash seed. In canonical form, the date is removed, torch's version is the public one
(2.13.0), the identifiers are derived from the files' paths in the package, and maps are sorted.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coremltools.proto import MIL_pb2, Model_pb2

from shardmill.errors import ShardmillError
from shardmill.files import load_json
from shardmill.models.interface import MAIN

MODEL_FILE = Path("Data/com.apple.CoreML/model.mlmodel")
WEIGHT_FILE = Path("Data/com.apple.CoreML/weights/weight.bin")
HALF = "_to_fp16"  # how coremltools ends the name of a constant of fp16
DATE, TRACER = (f"com.github.apple.coremltools.{entry}" for entry in ("conversion_date", "source"))
REMEDY = "shardmill can't convert this model yet"


class StampError(ShardmillError):
    """A graph that can't be stamped."""


def canonicalize(path: Path) -> None:
    """Rewrite the package at `path` in place."""
    spec = load_spec(path)
    neutralize(spec)
    (path / MODEL_FILE).write_bytes(spec.SerializeToString(deterministic=True))
    manifest = load_json(path / "Manifest.json")
    entries = sorted(manifest["itemInfoEntries"].values(), key=lambda entry: entry["path"])
    names = {entry["path"]: str(uuid.uuid5(uuid.NAMESPACE_URL, entry["path"])).upper() for entry in entries}
    manifest["itemInfoEntries"] = {names[entry["path"]]: entry for entry in entries}
    manifest["rootModelIdentifier"] = names[MODEL_FILE.relative_to("Data").as_posix()]
    (path / "Manifest.json").write_text(json.dumps(manifest, indent=4, sort_keys=True) + "\n")
    for file in path.rglob("*"):  # coremltools gives some files the mode of a temporary one
        file.chmod(0o755 if file.is_dir() else 0o644)


def neutralize(spec: Any) -> None:
    """Remove from a Model_pb2.Model, in place, when it was made and by which build of torch."""
    notes = spec.description.metadata.userDefined
    notes.pop(DATE, None)
    if TRACER in notes:
        notes[TRACER] = notes[TRACER].partition("+")[0]  # of torch==2.13.0+cu130, torch==2.13.0


def load_spec(path: Path) -> Any:
    """Return the protobuf of a package."""
    return parse_spec((path / MODEL_FILE).read_bytes())


def parse_spec(content: bytes) -> Any:
    """Return a Model_pb2.Model."""
    spec = Model_pb2.Model()
    spec.ParseFromString(content)
    return spec


def main_function(spec: Any) -> Any:
    """Return a model's only function, or the default one of several."""
    return spec.mlProgram.functions[spec.description.defaultFunctionName or MAIN]


def main_block(spec: Any) -> Any:
    """Return the function's only block."""
    (block,) = main_function(spec).block_specializations.values()
    return block


def named_arguments(operation: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named values that an operation reads, each with its parameter, numbered if it has several."""
    for key in sorted(operation.inputs):
        arguments = operation.inputs[key].arguments
        for i, argument in enumerate(arguments):
            if argument.WhichOneof("binding") == "name":
                yield (key if len(arguments) == 1 else f"{key}_{i}"), argument


def stored_values(operation: Any) -> list[Any]:
    """Return an operation's values that lie in the weight file, in the order of their names."""
    attributes = [operation.attributes[key] for key in sorted(operation.attributes)]
    values = [argument.value for key in sorted(operation.inputs) for argument in operation.inputs[key].arguments]
    return [value for value in (*attributes, *values) if value.WhichOneof("value") == "blobFileValue"]


def weight_sites(spec: Any) -> Iterator[tuple[str, list[Any]]]:
    """Return name and protobuf values (data, then scale or table) of every weight, in the order of the program."""
    for operation in main_block(spec).operations:
        if values := stored_values(operation):
            yield re.sub("_to_fp16(_quantized|_palettized)?$", "", operation.outputs[0].name), values


def constant(name: str, value: Any) -> Any:
    """Return the constant of a program with this protobuf value."""
    from coremltools.converters.mil.backend.mil.helper import create_scalar_value

    operation = MIL_pb2.Operation(type="const")
    operation.outputs.add(name=name, type=value.type)
    operation.attributes["val"].CopyFrom(value)
    operation.attributes["name"].CopyFrom(create_scalar_value(name))
    return operation


def call(operation: Any, name: str) -> None:
    """Set the name of an operation and of its only result."""
    operation.outputs[0].name = name
    operation.attributes["name"].immediateValue.tensor.strings.values[0] = name


def copied(message: Any) -> Any:
    """Return a copy of a protobuf message."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def check_closed(spec: Any) -> None:
    """Check that every name is defined once, before it is used. Raises StampError."""
    defined = {value.name for value in main_function(spec).inputs}
    for operation in main_block(spec).operations:
        for _, argument in named_arguments(operation):
            if argument.name not in defined:
                raise StampError(f"{argument.name}: used before it is defined; {REMEDY}")
        for output in operation.outputs:
            if output.name in defined:
                raise StampError(f"{output.name}: defined twice; {REMEDY}")
            defined.add(output.name)
    if missing := [name for name in main_block(spec).outputs if name not in defined]:
        raise StampError(f"{missing[0]}: an output that nothing defines; {REMEDY}")
