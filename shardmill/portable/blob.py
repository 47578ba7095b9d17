"""Weight files: the arrays that a program's blob literals point to.

Layout (coremltools `mlmodel/src/MILBlob/Blob/StorageFormat.hpp`): at a blob's offset stands a 64-byte record of
sentinel 0xDEADBEEF (u32), type (u32), size in bytes (u64), data offset (u64). The record is checked against the
file's length before coremltools' own reader, which trusts it, reads the data.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .dtypes import BY_NAME
from .errors import ProgramError
from .program import Blob, TensorType, Value
from .read_proto import element_count

SENTINEL = 0xDEADBEEF
RECORD = struct.Struct("<IIQQ")
RECORD_BYTES = 64
MODEL_PREFIX = "@model_path/"
READERS = {
    "fp16": "read_fp16_data",
    "fp32": "read_float_data",
    "int4": "read_int4_data",
    "int8": "read_int8_data",
    "int16": "read_int16_data",
    "int32": "read_int32_data",
    "uint1": "read_uint1_data",
    "uint2": "read_uint2_data",
    "uint3": "read_uint3_data",
    "uint4": "read_uint4_data",
    "uint6": "read_uint6_data",
    "uint8": "read_uint8_data",
    "uint16": "read_uint16_data",
    "uint32": "read_uint32_data",
}


class WeightFile:
    """One open weight file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ProgramError(f"weight file {path.name} is missing: {path}")
        self.path = path
        self.size = path.stat().st_size

    @cached_property
    def _reader(self) -> Any:
        from coremltools.libmilstoragepython import _BlobStorageReader  # noqa: PLC0415 - a slow import

        return _BlobStorageReader(str(self.path))

    def read(self, offset: int, kind: TensorType) -> np.ndarray:
        """The array whose record stands at `offset`. Raises ProgramError where record, type and file disagree."""
        count = element_count(kind)
        stored = self._stored_bytes(offset)
        if kind.dtype not in READERS:
            raise ProgramError(f"{self.path.name}: type {kind.dtype} can't be stored in a weight file")
        scalar = BY_NAME[kind.dtype]
        if stored < (count * scalar.bits + 7) // 8:
            raise ProgramError(f"{self.path.name}: the record at {offset} holds {stored} bytes, too few for {kind}")
        try:
            flat = getattr(self._reader, READERS[kind.dtype])(offset)
        except Exception as error:
            raise ProgramError(
                f"{self.path.name}: the record at {offset} can't be read as {kind.dtype}: {error}"
            ) from error
        array = np.asarray(flat).reshape(-1)
        array = array.view(scalar.numpy) if kind.dtype == "fp16" else array.astype(scalar.numpy, copy=False)
        if array.size < count:
            raise ProgramError(f"{self.path.name}: the record at {offset} holds {array.size} values, not {count}")
        return array[:count].reshape(tuple(d or 0 for d in kind.shape))

    def _stored_bytes(self, offset: int) -> int:
        if offset % RECORD_BYTES or offset + RECORD_BYTES > self.size:
            raise ProgramError(f"{self.path.name}: blob offset {offset} lies outside the file of {self.size} bytes")
        with self.path.open("rb") as file:
            file.seek(offset)
            sentinel, _, size, start = RECORD.unpack(file.read(RECORD.size))
        if sentinel != SENTINEL or start + size > self.size:
            raise ProgramError(f"{self.path.name}: the record at {offset} is damaged")
        return int(size)


def weight_loader(model_dir: Path) -> Callable[[Value], np.ndarray]:
    """A function from a tensor literal to its array, whether immediate or in a weight file below `model_dir`."""
    files: dict[str, WeightFile] = {}

    def load(value: Value) -> np.ndarray:
        if isinstance(value.data, np.ndarray):
            return value.data
        if not isinstance(value.data, Blob) or not isinstance(value.type, TensorType):
            raise ProgramError("a literal that is not a tensor is used as one")
        path = resolve(value.data.path, model_dir)
        if str(path) not in files:
            files[str(path)] = WeightFile(path)
        return files[str(path)].read(value.data.offset, value.type)

    return load


def resolve(path: str, model_dir: Path) -> Path:
    """Where a blob's file is. Raises ProgramError for a path that leaves the model's directory."""
    relative = path.removeprefix(MODEL_PREFIX)
    full = Path(os.path.normpath(model_dir / relative))
    if not full.is_relative_to(Path(os.path.normpath(model_dir))):
        raise ProgramError(f"weight file path {path!r} leaves the model's directory")
    return full
