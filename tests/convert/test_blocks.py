"""A matrix that is read in several blocks lies in the file as it does when it is encoded as a whole.

Rows of five numbers: of six bits or four, a row does not end on a whole byte.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor

from shardmill.checkpoint.headers import read_header
from shardmill.convert import blob, palette, stream
from shardmill.convert.placing import _constant_weights
from shardmill.convert.stream import RowRange
from shardmill.convert.table import write_table
from shardmill.forms.form import form
from shardmill.models.architecture import TensorSource
from shardmill.plan import Constant

from .small import LAYERS, draft, write_checkpoint

ROWS, COLUMNS, GROUP = 48, 5, 6
SIZES = [1, 7 * COLUMNS, 25 * COLUMNS, 1 << 18]  # of a block, in numbers


def write_matrix(folder: Path, name: str, rows: int = ROWS) -> tuple[Constant, Tensor]:
    """A matrix of numbers that all differ, in a file of its own."""
    values = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows))
    values.numpy().tofile(folder / f"{name}.bin")
    size = values.numel() * values.element_size()
    return Constant(name, TensorSource(name), None, f"{name}.bin", 0, size, "F32", (rows, COLUMNS)), values


def streamed(contents: list[stream.Content], folder: Path, size: int) -> bytes:
    """The file that contents give, of `size` bytes."""
    with stream.created(folder / "made") as descriptor:
        os.ftruncate(descriptor, size)
        stream.stream(descriptor, contents, folder, threads=2)
    return (folder / "made").read_bytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["palette4", "palette6", "palette4/6", "palette6/6", "palette8/6"])
def test_palettes_and_their_tables_have_their_places(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BLOCK", size)
    tensor, values = write_matrix(tmp_path, "m")
    wanted, half = form(name), values.half().numpy()
    groups = half.reshape(wanted.tables(ROWS), -1)
    tables = [palette.palette_table(palette.histogram(group), 2**wanted.bits) for group in groups]
    codes: list[NDArray[np.uint8]] = [palette.indices(*pair) for pair in zip(tables, groups, strict=True)]
    expected = blob.packed(np.concatenate(codes), wanted.bits).tobytes() + np.concatenate(tables).tobytes()
    bands = (RowRange((replace(tensor),)),)
    data, _ = wanted.blobs((ROWS, COLUMNS))
    assert streamed([stream.Palette(bands, 0, data, wanted)], tmp_path, len(expected)) == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["int4", "int8", "fp16"])
def test_integers_and_their_scales_have_their_places(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BLOCK", size)
    tensor, values = write_matrix(tmp_path, "m")
    wanted = form(name)
    if wanted.kind == "fp16":
        expected, scale = values.half().numpy().tobytes(), None
    else:
        codes, scales, _ = palette.to_integers(values, wanted.levels)
        expected = blob.packed(codes.numpy(), wanted.bits).tobytes()
        expected, scale = expected + scales.numpy().tobytes(), len(expected)
    content = stream.Weight(RowRange((tensor,)), 0, scale, wanted)
    assert streamed([content], tmp_path, len(expected)) == expected


@dataclass(frozen=True)
class Joined:
    """A part with one matrix."""

    tensors: tuple[Constant, ...]
    shapes: dict[str, tuple[int, int]]
    name: str = "joined"


@pytest.mark.parametrize("name", ["int4", "int8", "fp16"])
def test_tensors_that_are_bands_of_a_matrix_lie_one_below_the_other_with_their_scales(
    name: str, tmp_path: Path
) -> None:
    """As the experts of a layer do, and the heads of a projection whose rows are in another order."""
    (above, values), (below, others) = (write_matrix(tmp_path, each, rows) for each, rows in (("a", 32), ("b", 16)))
    part = Joined((replace(above, path="m"), replace(below, path="m", at=(32, 0))), {"m": (48, COLUMNS)})
    wanted, whole = form(name), torch.cat([values, others])
    expected = [whole.half().numpy().tobytes()]
    if wanted.kind != "fp16":
        codes, scales, _ = palette.to_integers(whole, wanted.levels)
        expected = [blob.packed(codes.numpy(), wanted.bits).tobytes(), scales.numpy().tobytes()]
    places = [0, len(expected[0])][: len(expected)]
    contents = _constant_weights(part, "m", name, places)  # type: ignore[arg-type]
    assert len(contents) == 2
    assert streamed(contents, tmp_path, len(b"".join(expected))) == b"".join(expected)


@pytest.mark.parametrize("order", [1, -1])
def test_a_table_in_int8_stands_after_those_in_fp16(order: int, tmp_path: Path) -> None:
    """It may have an odd number of bytes, and fp16 numbers begin at even places."""
    part = draft(write_checkpoint(tmp_path / "checkpoint"), [[0, LAYERS]])["embedding"]
    (first, values), (second, others) = (
        write_matrix(tmp_path, name, rows) for name, rows in (("embedding", 7), ("more", 3))
    )
    write_table(replace(part, tensors=(first, second)[::order]), tmp_path, tmp_path / "made", 1, "int8")
    places = {info.name: (info.start % 2, info.dtype) for info in read_header(tmp_path, "made")}
    assert places == {"embedding": (0, "I8"), "embedding.scale": (0, "F16"), "more": (0, "F16")}
    starts = {info.name: info.start for info in read_header(tmp_path, "made")}
    assert max(starts, key=starts.__getitem__) == "embedding"
    found, (codes, scale, _) = load_file(tmp_path / "made"), palette.to_integers(values)
    assert np.array_equal(found["embedding"], codes.numpy()) and np.array_equal(found["embedding.scale"], scale.numpy())
    assert np.array_equal(found["more"], others.half().numpy())
