"""Weight files: the arrays that a program's blob literals point to.

Layout (coremltools `mlmodel/src/MILBlob/Blob/StorageFormat.hpp`): at a blob's offset stands a 64-byte record of
sentinel 0xDEADBEEF (u32), type (u32), size in bytes (u64), data offset (u64). The record is checked against the
file's length before anything is read. Arrays that are stored as numpy holds them are mapped, so an array costs no
memory until it is used, and processes share it. coremltools' own reader reads all other arrays.
"""

from __future__ import annotations

import os
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import ProgramError
from portable_coreml.files.read_proto import element_count
from portable_coreml.program import Blob, TensorType, Value

SENTINEL = 0xDEADBEEF
RECORD = struct.Struct("<IIQQ")
RECORD_BYTES = 64
_MODEL_PREFIX = "@model_path/"
MAPPED = {"fp16": 1, "fp32": 2, "uint8": 3, "int8": 4, "int16": 6, "uint16": 7, "int32": 14, "uint32": 15}  # numbers
READERS = {
    "int4": "read_int4_data",
    "uint1": "read_uint1_data",
    "uint2": "read_uint2_data",
    "uint3": "read_uint3_data",
    "uint4": "read_uint4_data",
    "uint6": "read_uint6_data",
}


class WeightFile:
    """One open weight file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ProgramError(f"weight file {path.name} is missing: {path}")
        self.path, status = path, path.stat()
        self.size = status.st_size
        self.identity = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size

    @cached_property
    def _reader(self) -> Any:
        from coremltools.libmilstoragepython import _BlobStorageReader

        return _BlobStorageReader(str(self.path))

    @cached_property
    def _bytes(self) -> np.ndarray:
        return np.memmap(self.path, np.uint8, mode="c")

    def read(self, offset: int, kind: TensorType) -> np.ndarray:
        """Return the array whose record is at `offset`, read-only by convention.

        Raises ProgramError if record, type and file disagree.
        """
        count, shape = element_count(kind), tuple(d or 0 for d in kind.shape)
        number, stored, start = self._record(offset)
        if kind.dtype not in MAPPED and kind.dtype not in READERS:
            raise ProgramError(f"{self.path.name}: type {kind.dtype} can't be stored in a weight file")
        needed = (count * BY_NAME[kind.dtype].bits + 7) // 8
        if stored < needed:
            raise ProgramError(f"{self.path.name}: the record at {offset} holds {stored} bytes, too few for {kind}")
        if kind.dtype in READERS:
            return self._unpacked(offset, kind.dtype, count).reshape(shape)
        if number != MAPPED[kind.dtype]:
            raise ProgramError(f"{self.path.name}: the record at {offset} is of type {number}, not {kind.dtype}")
        return self._bytes[start : start + needed].view(BY_NAME[kind.dtype].numpy).reshape(shape)

    def _unpacked(self, offset: int, dtype: str, count: int) -> np.ndarray:
        """Return `count` values of a type that numpy does not have."""
        try:
            flat = np.asarray(getattr(self._reader, READERS[dtype])(offset)).reshape(-1)
        except Exception as error:
            raise ProgramError(f"{self.path.name}: the record at {offset} can't be read as {dtype}: {error}") from error
        if flat.size < count:
            raise ProgramError(f"{self.path.name}: the record at {offset} holds {flat.size} values, not {count}")
        return flat.astype(BY_NAME[dtype].numpy, copy=False)[:count]

    def _record(self, offset: int) -> tuple[int, int, int]:
        """Return the type number, size in bytes and start of the data."""
        if offset % RECORD_BYTES or offset + RECORD_BYTES > self.size:
            raise ProgramError(f"{self.path.name}: blob offset {offset} lies outside the file of {self.size} bytes")
        with self.path.open("rb") as file:
            file.seek(offset)
            sentinel, number, size, start = RECORD.unpack(file.read(RECORD.size))
        if sentinel != SENTINEL or start + size > self.size:
            raise ProgramError(f"{self.path.name}: the record at {offset} is damaged")
        return number, size, start


class WeightLoader:
    """Gives the arrays of a model's tensor literals, whether immediate or in a weight file below `model_dir`."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._files: dict[str, WeightFile] = {}

    def __call__(self, value: Value) -> np.ndarray:
        """Return a literal's array. Raises ProgramError if it is not a tensor, or its file does not contain it."""
        if isinstance(value.data, np.ndarray):
            return value.data
        if not isinstance(value.data, Blob) or not isinstance(value.type, TensorType):
            raise ProgramError("a literal that is not a tensor is used as one")
        return self._file(value.data).read(value.data.offset, value.type)

    def place(self, value: Value) -> tuple[int, ...] | None:
        """Return where a literal's array is: the file, which may have several names, and the offset.

        None for a literal that is not in a weight file.
        """
        return (*self._file(value.data).identity, value.data.offset) if isinstance(value.data, Blob) else None

    def _file(self, blob: Blob) -> WeightFile:
        path = resolve(blob.path, self._model_dir)
        if str(path) not in self._files:
            self._files[str(path)] = WeightFile(path)
        return self._files[str(path)]


def resolve(path: str, model_dir: Path) -> Path:
    """Return where a blob's file is. Raises ProgramError for a path that leaves the model's directory."""
    relative = path.removeprefix(_MODEL_PREFIX)
    full = Path(os.path.normpath(model_dir / relative))
    if not full.is_relative_to(Path(os.path.normpath(model_dir))):
        raise ProgramError(f"weight file path {path!r} leaves the model's directory")
    return full
