"""Streams a part's weights from the checkpoint's byte ranges into the weight file, a block of rows at a time.

The place of each weight is known before the first weight is read, so blocks are independent. A few threads read, encode
and write blocks in any order, and each thread holds at most one block in memory. A palette may depend on all rows of
its matrix, so one thread encodes the whole matrix. This thread reads the matrix up to twice, also block by block.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shardmill.checkpoint.headers import TensorInfo
from shardmill.convert import blob, palette
from shardmill.convert.weights import DTYPES, FP16_MAX, beside
from shardmill.errors import CheckpointError, ShardmillError
from shardmill.forms.form import Form, form
from shardmill.models.sources import turned
from shardmill.plan import Constant

EIGHT = 8  # this many rows end on a whole byte, for any bits per number and any number of columns


@dataclass(frozen=True)
class RowRange:
    """Blocks of a constant that lie side by side: all rows of the constant from `row` up to the next band."""

    tensors: tuple[Constant, ...]
    row: int = 0

    @property
    def whole(self) -> bool:
        """Return whether the rows have to be made all at once, because they do not lie one after the other."""
        return any(map(_is_scattered, self.tensors))

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and columns; a vector is one row."""
        first = self.tensors[0].shape
        if len(first) == 1:
            return 1, first[0]
        return first[0], sum(math.prod(tensor.shape[1:]) for tensor in self.tensors)

    @property
    def label(self) -> str:
        """Return the name of the band for error messages."""
        return self.tensors[0].label

    def step(self, size: int) -> int:
        """Return how many rows are read at a time: about `size` numbers."""
        rows, columns = self.shape
        return rows if self.whole else max(1, size // columns // EIGHT) * EIGHT

    def starts(self, size: int) -> range:
        """Return the first row of each block."""
        return range(0, self.shape[0], self.step(size))

    def read(self, row: int, size: int, source: Path) -> torch.Tensor:
        """Return the rows [n, columns] of the block that starts at `row`, in the checkpoint's dtype or fp32.

        Raises:
            CheckpointError: if the file ends within the rows.
        """
        count, columns = min(self.step(size), self.shape[0] - row), self.shape[1]
        blocks = [_rows_of(tensor, row, count, source) for tensor in self.tensors]
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)).reshape(count, columns).contiguous()


def bands(tensors: Sequence[Constant]) -> list[RowRange]:
    """Return the bands of one constant's blocks, from the first row on."""
    by_row: dict[int, list[Constant]] = {}
    for tensor in tensors:
        by_row.setdefault(tensor.at[0], []).append(tensor)
    return [RowRange(tuple(band), row) for row, band in sorted(by_row.items())]


def _in_groups(
    ranges: Sequence[RowRange], unit: int, size: int, source: Path
) -> Iterator[tuple[RowRange, torch.Tensor]]:
    """Yield all rows of a constant in order, in fp32, in groups, each with the band of the group's last row.

    Args:
        ranges: the bands of the constant.
        unit: each group has a multiple of this number of rows; the remaining rows come last.
        size: about how many numbers are read at a time.
        source: the checkpoint's folder.
    """
    rest = torch.empty(0, ranges[0].shape[1])
    for band in ranges:
        for row in band.starts(size):
            rest = torch.cat([rest, band.read(row, size, source).float()])
            full = len(rest) - len(rest) % unit
            if full:
                yield band, rest[:full]
            rest = rest[full:]
    if len(rest):
        yield ranges[-1], rest


def _rows_of(tensor: Constant, row: int, count: int, source: Path) -> torch.Tensor:
    """Return rows [row, row + count) of a block, or all rows if they do not lie one after the other."""
    if len(tensor.shape) == 1 or _is_scattered(tensor):
        return turned(_read(tensor, 0, tensor.stored[0], source), tensor.source, beside(tensor, source))
    first = tensor.source.rows[0] if tensor.source.rows else 0
    stored = _read(tensor, first + row, count, source)
    return turned(stored, replace(tensor.source, rows=None), beside(tensor, source))


def _is_scattered(tensor: Constant) -> bool:
    """Return whether a block's rows do not lie one after the other, or whether each row depends on all rows."""
    source = tensor.source
    strided = source.rows is not None and source.rows[2] != 1
    return source.transposed or strided or source.repeat > 1 or bool(source.magnitude)


def _read(tensor: Constant, row: int, count: int, source: Path) -> torch.Tensor:
    """Return rows [row, row + count) of a block's bytes as they lie in the checkpoint: [count, ...]."""
    dtype, rest = DTYPES[tensor.dtype], tensor.stored[1:]
    stride = math.prod(rest) * dtype.itemsize
    raw = np.empty(count * stride, np.uint8)
    with (source / tensor.file).open("rb", buffering=0) as stream:
        stream.seek(tensor.start + row * stride)
        if stream.readinto(raw.data) != raw.size:
            raise CheckpointError(f"{tensor.file}: ends within {tensor.label}; fetch it again")
    return torch.from_numpy(raw).view(dtype).reshape(count, *rest)


HALF = form("fp16")
BLOCK = 1 << 18  # weights: the fp32 block and its scratch copies stay in a core's cache
NOTHING = np.zeros(0, np.float16)
NUMPY = {"I8": np.int8, "U8": np.uint8, "F16": np.float16}


@dataclass(frozen=True)
class Weight:
    """A band of a constant, and its offsets in a file: `data` for the rows, `scale` for one fp16 scale per row."""

    band: RowRange
    data: int
    scale: int | None = None
    form: Form = HALF


@dataclass(frozen=True)
class Palette:
    """A matrix stored as palettes, and the offsets at which its indices and tables go into a file."""

    bands: tuple[RowRange, ...]
    data: int
    tables: int
    form: Form


@dataclass(frozen=True)
class LiteralWeight:
    """A constant whose values do not come from the checkpoint, in fp16."""

    values: tuple[float, ...]
    data: int


@dataclass(frozen=True)
class PrequantizedWeight:
    """Numbers that a file holds as they will be stored, except for packing into `bits` bits.

    Attributes:
        info: where the numbers lie in `folder`.
        least: the smallest number allowed.
        most: the largest number allowed.
    """

    info: TensorInfo
    folder: Path
    data: int
    bits: int
    least: int = 0
    most: int = 0


Content = Weight | Palette | LiteralWeight | PrequantizedWeight
Job = Callable[[], None]


def write_weights(
    file: Path, blobs: list[blob.WeightBlob], contents: Sequence[Content], source: Path, threads: int
) -> None:
    """Write the weight file. Raises CheckpointError for a weight that fp16 can't hold, or a file that is too short."""
    with created(file) as descriptor:
        blob.write_records(descriptor, blobs)
        stream(descriptor, contents, source, threads)


@contextmanager
def created(file: Path) -> Iterator[int]:
    """Yield the descriptor of a new file."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def stream(descriptor: int, contents: Sequence[Content], source: Path, threads: int) -> None:
    """Write weights to their places in a file; raises as `write_weights` does."""
    jobs = [job for content in contents for job in _jobs(descriptor, content, source)]
    with single_threaded_torch(threads) as pool:
        for _ in pool.map(lambda job: job(), jobs):
            pass  # raises what a job raised


def _jobs(descriptor: int, content: Content, source: Path) -> Iterator[Job]:
    """Yield the jobs that write a content; no job depends on another."""
    match content:
        case Weight():
            for row in content.band.starts(BLOCK):
                yield partial(_write_block, descriptor, content, row, source)
        case Palette():
            yield partial(_write_palette, descriptor, content, source)
        case LiteralWeight():
            values = np.asarray(content.values, np.float16)
            yield partial(blob.write_at, descriptor, values.data, content.data)
        case PrequantizedWeight():
            for start in range(content.info.start, content.info.end, BLOCK):
                yield partial(_write_made, descriptor, content, start)


@contextmanager
def single_threaded_torch(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool in whose threads PyTorch starts no further threads."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _write_block(descriptor: int, weight: Weight, row: int, source: Path) -> None:
    """Read, encode and write the rows of the block that starts at `row`."""
    rows = weight.band.read(row, BLOCK, source)
    if weight.scale is None:
        data, magnitude = palette.to_fp16(rows)
    else:
        data, scale, magnitude = palette.to_integers(rows, weight.form.levels)
        if magnitude <= FP16_MAX and not scale.isfinite().all():
            raise CheckpointError(
                f"{weight.band.label}: holds values over {FP16_MAX / 2:.0f}, whose scale fp16 can't hold; "
                "give it the form fp16 in a recipe"
            )
        blob.write_at(descriptor, scale.numpy().data, weight.scale + 2 * row)
    _demand_fp16(magnitude, weight.band)
    bits = weight.form.bits
    made = data.numpy() if weight.scale is None else blob.packed(data.numpy(), bits)
    blob.write_at(descriptor, made.data, weight.data + row * weight.band.shape[1] * bits // 8)


def _demand_fp16(magnitude: float, band: RowRange) -> None:
    if not palette.fits_fp16(magnitude):
        raise CheckpointError(f"{band.label}: holds values over {FP16_MAX:.0f}, which fp16 programs can't")


def _write_palette(descriptor: int, matrix: Palette, source: Path) -> None:
    """Compute the tables of a matrix, and write the tables and the indices into the tables."""
    bits, group = matrix.form.bits, matrix.form.group
    counts = (palette.histogram(values) for values in _halves(matrix, source))
    shared = None if group else palette.palette_table(sum(counts, palette.histogram(NOTHING)), 2**bits)
    data, tables = matrix.data, matrix.tables
    for values in _halves(matrix, source):
        groups = values.reshape(-1, group * values.shape[1]) if group else values.reshape(1, -1)
        entries_of_each = [
            palette.palette_table(palette.histogram(each), 2**bits) if shared is None else shared for each in groups
        ]
        codes = [palette.indices(entries, each) for entries, each in zip(entries_of_each, groups, strict=True)]
        made = blob.packed(np.concatenate(codes), bits)
        blob.write_at(descriptor, made.data, data)
        data += len(made)
        blob.write_at(descriptor, np.concatenate(entries_of_each).data, tables)
        tables += 2 * 2**bits * len(groups) if group else 0


def _halves(matrix: Palette, source: Path) -> Iterator[NDArray[np.float16]]:
    """Yield all rows of a matrix in fp16, in order, whole groups and bytes at a time."""
    for band, rows in _in_groups(matrix.bands, math.lcm(matrix.form.group or 1, EIGHT), BLOCK, source):
        half, magnitude = palette.to_fp16(rows)
        _demand_fp16(magnitude, band)
        yield half.numpy()


def _write_made(descriptor: int, made: PrequantizedWeight, start: int) -> None:
    """Check, pack and write the bytes of the block that starts at `start`. Raises ShardmillError."""
    info = made.info
    with (made.folder / info.file).open("rb", buffering=0) as file:
        file.seek(start)
        raw = np.frombuffer(file.read(min(BLOCK, info.end - start)), NUMPY[info.dtype])
    if made.bits < HALF.bits and not made.least <= int(raw.min()) <= int(raw.max()) <= made.most:
        raise ShardmillError(f"{info.file}: {info.name} holds codes outside [{made.least}, {made.most}]")
    content = blob.packed(raw, made.bits) if made.bits < HALF.bits else raw
    blob.write_at(descriptor, content.data, made.data + (start - info.start) * made.bits // (8 * raw.itemsize))
