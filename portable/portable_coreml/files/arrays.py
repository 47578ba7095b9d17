"""Files of named arrays: .npz, as numpy writes them, and .safetensors, whose format is a header in JSON and bytes."""

from __future__ import annotations

import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from portable_coreml.errors import InputError
from portable_coreml.files.model import read_bytes

SUFFIXES = (".npz", ".safetensors")
_DTYPES = {
    **{"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"},
    **{"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?"},
}


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz or .safetensors file by name; of bf16 those that float32 holds.

    Raises InputError for another file; pickled objects in it are not loaded.
    """
    return _safetensors(path) if path.suffix == ".safetensors" else _npz(path)


def _npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not an .npz file of arrays: {error}") from error


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    data = read_bytes(path)
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        return {name: _array(entry, data[start:]) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: not a .safetensors file: {error}") from error


def _array(entry: Any, data: bytes) -> np.ndarray:
    shape, (first, last) = [int(size) for size in entry["shape"]], entry["data_offsets"]
    kind = np.dtype("<u2" if entry["dtype"] == "BF16" else f"<{_DTYPES[entry['dtype']]}")
    if first < 0 or min(shape, default=0) < 0 or last - first != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{last - first} bytes for {entry['dtype']} {shape}")
    array = np.frombuffer(data[first:last], kind).reshape(shape)
    return (array.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else array
