"""Canonical packages: the same program gives the same bytes in every process, on every machine.

coremltools writes a conversion date, random identifiers into the manifest, and protobuf maps in the order of a hash
seed. Here the date is removed, the identifiers are derived from the files' paths in the package, and maps are sorted.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coremltools.proto import Model_pb2

from shardmill.convert.placing import weight_sites
from shardmill.convert.template.pattern import StampError, main_block, main_function
from shardmill.files import load_json
from shardmill.models.interface import FIXED, EntryPoints
from shardmill.plan import Part

MODEL_FILE = Path("Data/com.apple.CoreML/model.mlmodel")
WEIGHT_FILE = Path("Data/com.apple.CoreML/weights/weight.bin")
VARYING = "com.github.apple.coremltools.conversion_date"


def save(model: Any, path: Path) -> None:
    """Write an MLModel as a canonical .mlpackage at `path`, which must not exist."""
    model.save(str(path))
    canonicalize(path)


def canonicalize(path: Path) -> None:
    """Rewrite the package at `path` in place."""
    spec = load_spec(path)
    spec.description.metadata.userDefined.pop(VARYING, None)
    (path / MODEL_FILE).write_bytes(spec.SerializeToString(deterministic=True))
    manifest = load_json(path / "Manifest.json")
    entries = sorted(manifest["itemInfoEntries"].values(), key=lambda entry: entry["path"])
    names = {entry["path"]: str(uuid.uuid5(uuid.NAMESPACE_URL, entry["path"])).upper() for entry in entries}
    manifest["itemInfoEntries"] = {names[entry["path"]]: entry for entry in entries}
    manifest["rootModelIdentifier"] = names[MODEL_FILE.relative_to("Data").as_posix()]
    (path / "Manifest.json").write_text(json.dumps(manifest, indent=4, sort_keys=True) + "\n")
    for file in path.rglob("*"):  # coremltools gives some files the mode of a temporary one
        file.chmod(0o755 if file.is_dir() else 0o644)


def load_spec(path: Path) -> Any:
    """Return the protobuf of a package."""
    spec = Model_pb2.Model()
    spec.ParseFromString((path / MODEL_FILE).read_bytes())
    return spec


def by_function(part: Part) -> Iterator[tuple[str, Part]]:
    """Yield a part of fixed shapes for each of its functions, by the function's name.

    Each yielded part equals the whole part, except for its width and, in a shorter context, its slots.
    """
    if part.calls.shapes != FIXED:
        return
    for slots, names in {part.slots: part.calls.functions, **part.calls.shorter}.items():
        for width, name in names.items():
            yield name, replace(part, slots=slots, tokens=width, calls=EntryPoints(FIXED, (width,), part.calls.state))


def share_places(placed: Any, others: Iterable[Any]) -> None:
    """Give the weights of programs the same places in the weight file as the weights of another program.

    Raises:
        StampError: if the programs do not have the same weights.
    """
    known = {name: [value.blobFileValue.offset for value in values] for name, values in weight_sites(placed)}
    for spec in others:
        sites = dict(weight_sites(spec))
        if {name: len(values) for name, values in sites.items()} != {name: len(at) for name, at in known.items()}:
            strange = sorted({*sites} ^ {*known})
            raise StampError(f"{strange[:1]}: a weight that another function does not have")
        for name, values in sites.items():
            for value, offset in zip(values, known[name], strict=True):
                value.blobFileValue.offset = offset


def combined(specs: Mapping[str, Any]) -> Any:
    """Combine models of one function each into one Model_pb2.Model, as coremltools' save_multifunction does.

    Args:
        specs: the models, by the name of their function in the result; the first is the default.
    """
    first = next(iter(specs.values()))
    made = type(first)(specificationVersion=first.specificationVersion)
    made.mlProgram.version = first.mlProgram.version
    for name, spec in specs.items():
        made.mlProgram.functions[name].CopyFrom(main_function(spec))
        described = made.description.functions.add(name=name)
        for field in ("input", "output", "state"):
            getattr(described, field).extend(getattr(spec.description, field))
    made.description.defaultFunctionName = next(iter(specs))
    made.description.metadata.SetInParent()
    return made


def save_combined(packages: Mapping[str, Path], path: Path) -> None:
    """Combine packages of one function each into a canonical .mlpackage, by coremltools.

    coremltools numbers the updates of states anew when it reads a program; here all operations keep their names from
    the packages.

    Args:
        packages: the packages, by the name of their function in the result; the first is the default.
        path: where the combined package goes.
    """
    import coremltools as ct

    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, source in packages.items():
        descriptor.add_function(str(source), "main", name)
    descriptor.default_function_name = next(iter(packages))
    ct.utils.save_multifunction(descriptor, str(path))
    spec = load_spec(path)
    for name, source in packages.items():
        function = spec.mlProgram.functions[name]
        operations = function.block_specializations[function.opset].operations
        for made, known in zip(operations, main_block(load_spec(source)).operations, strict=True):
            made.attributes["name"].CopyFrom(known.attributes["name"])
    (path / MODEL_FILE).write_bytes(spec.SerializeToString(deterministic=True))
    canonicalize(path)
