"""A model as the engine holds it, and how its specification is found and read.

Every reader of a package goes through `spec_file`, which refuses a manifest that points outside the package. Only
regular files are read: a device never ends, and a pipe may wait forever for someone to write to it.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from portable_coreml.errors import PortableError, ProgramError
from portable_coreml.files.read_proto import read_program
from portable_coreml.program import Function, Program

KEPT = 8  # programs that were read last, without their weights
MAX_SPEC_VERSION = 10  # iOS 26, the newest that coremltools 9.0 writes


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model. `description` is a ModelDescription message; `@model_path` stands for `model_dir`."""

    path: Path
    model_dir: Path
    spec_version: int
    description: Any
    program: Program


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises ProgramError for anything else, and for a file that can't be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or opening a pipe would wait for its writer
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ProgramError(f"{path}: not a regular file")
            return file.read()
    except OSError as error:
        raise ProgramError(f"{path}: can't be read: {error.strerror}") from error


def read_utf8(path: Path) -> str:
    """Return the text of a regular file in UTF-8. Raises ProgramError."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProgramError(f"{path}: not UTF-8 text: {error}") from error


def read_json(path: Path) -> Any:
    """Return the JSON value in a regular file. Raises ProgramError, also for one nested too deeply to be parsed."""
    try:
        return json.loads(read_utf8(path))
    except RecursionError as error:
        raise ProgramError(f"{path}: damaged: its JSON is nested too deeply") from error
    except ValueError as error:
        raise ProgramError(f"{path}: damaged: not JSON: {error}") from error


def parse_spec(path: Path) -> Any:
    """Return the Model message in a file. Raises ProgramError for a file that can't be read or holds something else."""
    from coremltools.proto import Model_pb2  # a slow import
    from google.protobuf.message import DecodeError

    spec = Model_pb2.Model()
    try:
        spec.ParseFromString(read_bytes(path))
    except DecodeError as error:
        raise ProgramError(f"{path}: damaged, or not a Core ML model: {error}") from error
    return spec


def mil_program(spec: Any, path: Path) -> Any:
    """Return the MIL.Program message of a Model message.

    Raises ProgramError, naming `path`, for another kind of model.
    """
    kind = spec.WhichOneof("Type")
    if kind != "mlProgram":
        raise ProgramError(f"{path}: a model of type {kind or 'unknown'}; the portable engine runs ML Programs only")
    return spec.mlProgram


def read_spec(spec: Any, path: Path) -> Program:
    """Return the program of a Model message.

    Raises ProgramError, naming `path`, if the model is not an ML Program or the program is not sound.
    """
    return _program(mil_program(spec, path).SerializeToString(deterministic=True))


@lru_cache(maxsize=KEPT)
def _program(data: bytes) -> Program:
    """Return the program of a serialised MIL.Program.

    The result is cached: judging a model loads it many times, and this step takes the longest.
    """
    from coremltools.proto import MIL_pb2

    return read_program(MIL_pb2.Program.FromString(data))


def spec_file(path: Path) -> Path:
    """Return the specification file of the .mlpackage or .mlmodel at `path`.

    Raises ProgramError if there is nothing.
    """
    if not os.path.exists(path):  # False where Path.exists raises: a name that is too long, a folder that is closed
        raise ProgramError(f"{path}: no such file or folder")
    return _root_spec(path) if os.path.isdir(path) else path


def _root_spec(package: Path) -> Path:
    """Return the specification file inside an .mlpackage, as its manifest names it.

    The path is judged as it is spelled: a package may consist of symbolic links, as in the Hugging Face cache.
    """
    manifest = package / "Manifest.json"
    if not manifest.exists():
        raise ProgramError(f"{package}: not an .mlpackage: it has no Manifest.json")
    content = read_json(manifest)
    try:
        relative = content["itemInfoEntries"][content["rootModelIdentifier"]]["path"]
    except (LookupError, TypeError) as error:
        raise ProgramError(f"{manifest}: damaged: it does not say where the model is") from error
    path = Path(os.path.normpath(package / "Data" / str(relative)))
    if not path.is_relative_to(os.path.normpath(package)):
        raise ProgramError(f"{package}: its manifest points outside the package")
    return path


def pick_function(model: LoadedModel, name: str) -> tuple[Function, Any]:
    """Return a function and its description, by name, or the default one for an empty name. Raises PortableError."""
    description = model.description
    wanted = name or description.defaultFunctionName or "main"
    if wanted not in model.program.functions:
        raise PortableError(f"{model.path}: no function '{wanted}'; it has {sorted(model.program.functions)}")
    for item in description.functions:
        if item.name == wanted:
            return model.program.functions[wanted], item
    return model.program.functions[wanted], description
