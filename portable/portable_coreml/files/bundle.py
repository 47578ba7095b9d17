"""Compiled bundles (.mlmodelc): writes a bundle from a package, and reads a bundle's description.

The layout was measured on 18 bundles of Apple's compiler. `coremldata.bin` is a fixed header, the ModelDescription
message, and 16 bytes per function. `analytics/coremldata.bin` holds the hash of the specification that was compiled.
`model.mil` is the program as text. Weight files are copies. For specification 9 no Apple-compiled coremldata.bin was
at hand. Its format number follows rebeckerspecialties/mlmodelc-export, which claims identity with coremlc 3520 there.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from portable_coreml.errors import ProgramError
from portable_coreml.files.blob import resolve
from portable_coreml.files.features import Feature, feature_of
from portable_coreml.files.metadata import metadata_json
from portable_coreml.files.model import KEPT, LoadedModel, parse_spec, read_bytes, read_spec, read_utf8, spec_file
from portable_coreml.files.read_text import read_text
from portable_coreml.files.write_text import write_text
from portable_coreml.program import Function, Program, blobs

ML_PROGRAM = 502  # the field number of mlProgram in the Model message
OLD_FORMAT = 5  # in every bundle of specification 6 and 7
_FIRST_NEW_SPEC = 9
HEADER = struct.Struct("<II20xQ7sB31xQ")
TRAILER = struct.pack("<I12x", ML_PROGRAM)
_MAX_TEXT_BYTES = 1 << 30


def compile_model(source: Path, destination: Path) -> Path:
    """Compile an .mlpackage, or an .mlmodel with an ML Program, to a bundle at `destination`.

    Weight files are hard-linked where the file system allows. Raises ProgramError for what is not a sound ML Program.
    """
    spec_path = spec_file(source)
    spec = parse_spec(spec_path)
    model = LoadedModel(
        source, spec_path.parent, int(spec.specificationVersion), spec.description, read_spec(spec, source)
    )
    weights = _weight_files(model)
    text = write_text(model.program, model.spec_version, _function_features(model))
    (destination / "analytics").mkdir(parents=True, exist_ok=True)
    (destination / "model.mil").write_text(text, encoding="utf-8")
    (destination / "coremldata.bin").write_bytes(core_data(model))
    (destination / "metadata.json").write_text(metadata_json(model, source.stem), encoding="utf-8")
    (destination / "analytics" / "coremldata.bin").write_bytes(analytics(read_bytes(spec_path), spec_path.stem))
    for relative, path in weights.items():
        target = destination / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(path, target)
    return destination


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)  # a link to a symbolic link would point nowhere from here
    except OSError:
        shutil.copyfile(source, target)


def _weight_files(model: LoadedModel) -> dict[Path, Path]:
    """Return bundle-relative path -> file, for every weight file that a program refers to.

    Raises ProgramError if one is missing.
    """
    files: dict[Path, Path] = {}
    for function in model.program.functions.values():
        for blob in blobs(function):
            path = resolve(blob.path, model.model_dir)
            if not path.is_file():
                raise ProgramError(f"{model.path}: weight file {blob.path} is missing")
            files[path.relative_to(model.model_dir)] = path
    return files


def _function_features(model: LoadedModel) -> dict[str, list[Feature]]:
    """Return the described inputs of every function."""
    described: dict[str, Iterable[Any]] = {item.name: item.input for item in model.description.functions}
    return {
        name: [feature_of(m) for m in described.get(name, model.description.input)] for name in model.program.functions
    }


def core_data(model: LoadedModel) -> bytes:
    """Return `coremldata.bin` of a model."""
    version, description = model.spec_version, type(model.description)()
    description.CopyFrom(model.description)
    description.metadata.SetInParent()  # the compiler writes an empty one where the source has none
    payload = description.SerializeToString(deterministic=True)
    number = OLD_FORMAT if version < _FIRST_NEW_SPEC else version
    header = HEADER.pack(ML_PROGRAM, number, 7, b"generic", version & 0xFF, len(payload))
    return bytes(header + payload + TRAILER * len(model.program.functions))


def analytics(spec: bytes, name: str) -> bytes:
    """Return `analytics/coremldata.bin`.

    Its records tie a bundle to the compiled specification by a hash of the specification's bytes.
    """
    digest = base64.b64encode(hashlib.sha256(spec).digest()).decode()
    sections = (
        ("NeuralNetworkModelDetails", (("containsCustomLayer", "0"), ("modelDimension", "0"))),
        ("SpecificationDetails", (("modelHash", digest), ("modelName", name))),
    )
    out = b""
    for title, entries in sections:
        out += _counted(title) + struct.pack("<Q", len(entries))
        out += b"".join(_counted(text) for pair in entries for text in pair)
    return out


def _counted(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def is_bundle(path: Path) -> bool:
    """Return whether there is a compiled bundle at `path`."""
    return os.path.isfile(path / "coremldata.bin")


def _read_bundle(path: Path) -> LoadedModel:
    """Return a compiled bundle as a model. Raises ProgramError for a bundle that is damaged or not an ML Program."""
    text_path = path / "model.mil"
    if not text_path.is_file():
        raise ProgramError(f"{path}: no model.mil: not a compiled ML Program")
    if text_path.stat().st_size > _MAX_TEXT_BYTES:
        raise ProgramError(f"{text_path}: larger than {_MAX_TEXT_BYTES} bytes")
    version, description = read_core_data(path / "coremldata.bin")
    try:
        program = _program(read_utf8(text_path), description.SerializeToString(deterministic=True))
    except ProgramError as error:
        raise ProgramError(f"{path}: {error}") from error
    return LoadedModel(path, path, version, description, program)


@lru_cache(maxsize=KEPT)
def _program(text: str, description: bytes) -> Program:
    """Return the program of a bundle's files, read once however often it is loaded."""
    from coremltools.proto import Model_pb2

    return _in_described_order(read_text(text), Model_pb2.ModelDescription.FromString(description))


def read_core_data(path: Path) -> tuple[int, Any]:
    """Return (specification version, ModelDescription message) of a coremldata.bin."""
    from coremltools.proto import Model_pb2  # a slow import
    from google.protobuf.message import DecodeError

    try:
        data = read_bytes(path)
        kind, _, _, _, version, size = HEADER.unpack_from(data)
        payload = data[HEADER.size : HEADER.size + size]
        if kind != ML_PROGRAM or len(payload) != size:
            raise ProgramError(f"{path}: damaged, or of a model that is not an ML Program")
        description = Model_pb2.ModelDescription()
        description.ParseFromString(payload)
    except (struct.error, DecodeError) as error:
        raise ProgramError(f"{path}: can't be read: {error}") from error
    return int(version), description


def frame(path: Path) -> tuple[bytes, bytes]:
    """Return the bytes before and after the description in a coremldata.bin that read_core_data can read."""
    data = path.read_bytes()
    size = HEADER.unpack_from(data)[-1]
    return data[: HEADER.size - 8], data[HEADER.size + size :]


def _in_described_order(program: Program, description: Any) -> Program:
    """Return parameters in the order of the description: in the text they are sorted by name."""
    described = {item.name: item for item in description.functions}
    ordered = {}
    for name, function in program.functions.items():
        source = described.get(name, description)
        order = {m.name: i for i, m in enumerate([*source.input, *source.state])}
        inputs = tuple(sorted(function.inputs, key=lambda item: order.get(item.name, len(order))))
        ordered[name] = Function(name, inputs, function.opset, function.block, function.attributes)
    return Program(ordered, program.attributes, program.version)


def load_model(path: Path) -> LoadedModel:
    """Return the model at `path`. Raises ProgramError, naming the file, if it is not a readable ML Program."""
    if is_bundle(path):
        return _read_bundle(path)
    spec_path = spec_file(path)
    spec = parse_spec(spec_path)
    return LoadedModel(path, spec_path.parent, int(spec.specificationVersion), spec.description, read_spec(spec, path))
