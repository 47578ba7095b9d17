"""A model as the engine holds it, and how its specification is found and read.

Every reader of a package goes through `root_spec`, which refuses a manifest that points outside the package.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable_coreml.errors import PortableError, ProgramError
from portable_coreml.files.read_proto import read_program
from portable_coreml.program import Function, Program

MAX_SPEC_VERSION = 10  # iOS 26, the newest that coremltools 9.0 writes


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """`description` is a ModelDescription message; `model_dir` is what `@model_path` stands for."""

    path: Path
    model_dir: Path
    spec_version: int
    description: Any
    program: Program


def parse_spec(path: Path) -> Any:
    """The Model message in a file."""
    from coremltools.proto import Model_pb2  # noqa: PLC0415 - a slow import
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    spec = Model_pb2.Model()
    try:
        spec.ParseFromString(path.read_bytes())
    except (DecodeError, OSError) as error:
        raise ProgramError(f"{path}: not a Core ML model specification: {error}") from error
    return spec


def read_spec(spec: Any, path: Path) -> Program:
    """The program of a Model message."""
    kind = spec.WhichOneof("Type")
    if kind != "mlProgram":
        raise ProgramError(f"{path}: a model of type {kind}; the portable engine runs ML Programs only")
    return read_program(spec.mlProgram)


def root_spec(package: Path) -> Path:
    """The specification file inside an .mlpackage, as its manifest names it."""
    manifest = package / "Manifest.json"
    try:
        items = json.loads(manifest.read_text())
        relative = items["itemInfoEntries"][items["rootModelIdentifier"]]["path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProgramError(f"{package}: not a model package: its Manifest.json can't be read ({error})") from error
    path = (package / "Data" / str(relative)).resolve()
    if not path.is_relative_to(package.resolve()):
        raise ProgramError(f"{package}: its manifest points outside the package")
    return path


def pick_function(model: LoadedModel, name: str) -> tuple[Function, Any]:
    """A function and its description, by name, or the default one for an empty name. Raises PortableError."""
    description = model.description
    wanted = name or description.defaultFunctionName or "main"
    if wanted not in model.program.functions:
        raise PortableError(f"{model.path}: no function '{wanted}'; it has {sorted(model.program.functions)}")
    for item in description.functions:
        if item.name == wanted:
            return model.program.functions[wanted], item
    return model.program.functions[wanted], description
