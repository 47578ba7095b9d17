"""Weight files: what coremltools writes is read as it is, mapped where numpy has the type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from portable_coreml.errors import ProgramError
from portable_coreml.files.blob import MAPPED, WeightFile
from portable_coreml.program import TensorType

WRITERS = {"fp16": "fp16", "fp32": "float"}


def written(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, int]:
    """A weight file by coremltools, and the offset of each array's record."""
    from coremltools.libmilstoragepython import _BlobStorageWriter

    writer, offsets = _BlobStorageWriter(str(path)), {}
    for name, array in arrays.items():
        flat = array.reshape(-1)
        raw = flat.view(np.uint16) if name == "fp16" else flat
        offsets[name] = getattr(writer, f"write_{WRITERS.get(name, name)}_data")(raw)
    return offsets


def arrays() -> dict[str, np.ndarray]:
    """One array of each mapped type, its ends among the values."""
    rng, made = np.random.default_rng(0), {}
    for name in MAPPED:
        kind = np.dtype({"fp16": "float16", "fp32": "float32"}.get(name, name))
        if kind.kind == "f":
            made[name] = rng.standard_normal((3, 5)).astype(kind)
        else:
            ends = np.iinfo(kind)
            made[name] = rng.integers(ends.min, ends.max, (3, 5), dtype=kind, endpoint=True)
    return made


def test_every_type_is_what_coremltools_wrote(tmp_path: Path) -> None:
    known = arrays()
    offsets = written(tmp_path / "weight.bin", known)
    file = WeightFile(tmp_path / "weight.bin")
    for name, array in known.items():
        found = file.read(offsets[name], TensorType(name, (3, 5)))
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype
        assert not found.flags.owndata


def test_a_record_of_another_type_is_refused(tmp_path: Path) -> None:
    """The sizes would fit."""
    offsets = written(tmp_path / "weight.bin", arrays())
    file = WeightFile(tmp_path / "weight.bin")
    for stored, asked in (("fp16", "int16"), ("int8", "uint8"), ("fp32", "int32"), ("fp32", "fp16")):
        with pytest.raises(ProgramError, match=f"the record at {offsets[stored]} is of type .*, not {asked}"):
            file.read(offsets[stored], TensorType(asked, (3, 5)))


def test_more_values_than_are_there_are_refused(tmp_path: Path) -> None:
    offsets = written(tmp_path / "weight.bin", arrays())
    with pytest.raises(ProgramError, match="too few"):
        WeightFile(tmp_path / "weight.bin").read(offsets["fp16"], TensorType("fp16", (4, 5)))
