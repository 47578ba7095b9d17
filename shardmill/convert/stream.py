"""Streams a part's weights from the checkpoint's byte ranges into the weight file, a block of rows at a time.

Where each weight will lie is known before the first is read, so blocks are independent: a few threads read, encode and
write them in any order, and no more than one block per thread is in memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardmill import plan
from shardmill.convert import blob, quantize
from shardmill.convert.template.pattern import StampError
from shardmill.convert.template.program import main_block
from shardmill.convert.weights import DTYPES, FP16_MAX, beside
from shardmill.errors import CheckpointError
from shardmill.models.contract import computed, stem
from shardmill.models.sources import turned

BLOCK = 1 << 18  # weights: the fp32 block and its scratch copies stay in a core's cache


@dataclass(frozen=True)
class Weight:
    """Rows of a constant and the offsets at which they go into a file: fp16, or int8 with one fp16 scale per row."""

    tensors: tuple[plan.Tensor, ...]  # blocks, side by side
    data: int
    scale: int | None = None

    @property
    def whole(self) -> bool:
        """Whether the rows have to be made all at once, because they do not lie one after the other."""
        return any(map(_is_scattered, self.tensors))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns; a vector is one row."""
        first = self.tensors[0].shape
        if len(first) == 1:
            return 1, first[0]
        return first[0], sum(math.prod(tensor.shape[1:]) for tensor in self.tensors)


@dataclass(frozen=True)
class Given:
    """A constant that no checkpoint decides, in fp16."""

    values: tuple[float, ...]
    data: int


def place(spec: Any, part: plan.Part) -> tuple[list[blob.Blob], list[Weight | Given]]:
    """Gives every weight of the program its place in the weight file, in the order of use, and says what goes there.

    Raises StampError where the program's weights are not the part's tensors.
    """
    sites = list(weight_sites(spec))
    blobs = blob.lay_out([_kind_and_size(value) for _, values in sites for value in values])
    shapes, given = {stem(path): path for path in part.shapes}, {stem(p): v for p, v in computed(part.form).items()}
    left, weights = iter(blobs), list[Weight | Given]()
    for name, values in sites:
        offsets = [next(left) for _ in values]
        for value, where in zip(values, offsets, strict=True):
            value.blobFileValue.offset = where.offset
        if name in given:
            weights.append(Given(given[name], offsets[0].data))
            continue
        if name not in shapes or math.prod(extents(values[0])) != math.prod(part.shapes[shapes[name]]):
            raise StampError(f"{name}: the program's weight of {extents(values[0])} is no tensor of {part.name}")
        weights += _constant_weights(part, shapes.pop(name), *(where.data for where in offsets))
    if unused := sorted({*shapes, *(stem(tensor.path) for tensor in part.tensors if tensor.path not in part.shapes)}):
        raise StampError(f"{unused[0]}: a tensor of {part.name} that its program does not use")
    return blobs, weights


def _constant_weights(part: plan.Part, path: str, data: int, scale: int | None = None) -> list[Weight]:
    """What goes into a constant's place, block by block of those that lie under each other.

    Raises StampError where the blocks do not fill it.
    """
    bands: dict[int, list[plan.Tensor]] = {}
    for tensor in part.tensors:
        if tensor.path == path:
            bands.setdefault(tensor.at[0], []).append(tensor)
    held = sum(math.prod(tensor.shape) for band in bands.values() for tensor in band)
    if held != math.prod(part.shapes[path]):
        raise StampError(f"{stem(path)}: the tensors of {part.name} hold {held} numbers of {list(part.shapes[path])}")
    item, columns = 1 if scale is not None else 2, math.prod(part.shapes[path][1:])
    return [
        Weight(tuple(band), data + item * row * columns, None if scale is None else scale + 2 * row)
        for row, band in sorted(bands.items())
    ]


def weight_sites(spec: Any) -> Iterator[tuple[str, list[Any]]]:
    """Name and protobuf values (data, then scale) of every weight, in the order of the program."""
    for operation in main_block(spec).operations:
        arguments = [a.value for key in sorted(operation.inputs) for a in operation.inputs[key].arguments]
        attributes = [operation.attributes[key] for key in sorted(operation.attributes)]
        values = [v for v in (*attributes, *arguments) if v.WhichOneof("value") == "blobFileValue"]
        if values:
            yield re.sub("_to_fp16(_quantized)?$", "", operation.outputs[0].name), values


def extents(value: Any) -> list[int]:
    """The shape of a protobuf value."""
    return [dimension.constant.size for dimension in value.type.tensorType.dimensions]


def _kind_and_size(value: Any) -> tuple[int, int]:
    """Type and bytes of the blob for a protobuf value."""
    from coremltools.proto import MIL_pb2

    kinds = {MIL_pb2.FLOAT16: (blob.FP16, 2), MIL_pb2.INT8: (blob.INT8, 1)}
    kind, item = kinds[value.type.tensorType.dataType]
    return kind, item * math.prod(extents(value))


def write(file: Path, blobs: list[blob.Blob], weights: list[Weight | Given], source: Path, threads: int) -> None:
    """Writes the weight file. Raises CheckpointError for a weight that fp16 can't hold, or a file that is too short."""
    with created(file) as descriptor:
        blob.write_records(descriptor, blobs)
        for given in weights:
            if isinstance(given, Given):
                blob.write_at(descriptor, np.asarray(given.values, np.float16).data, given.data)
        stream(descriptor, [weight for weight in weights if isinstance(weight, Weight)], source, threads)


@contextmanager
def created(file: Path) -> Iterator[int]:
    """The descriptor of a new file."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def stream(descriptor: int, weights: list[Weight], source: Path, threads: int) -> None:
    """Writes weights to their places in a file; raises as `write` does."""
    jobs = [(weight, row) for weight in weights for row in range(0, weight.shape[0], _rows_per_block(weight))]
    with single_threaded_torch(threads) as pool:
        for _ in pool.map(lambda job: _write_block(descriptor, job[0], job[1], source), jobs):
            pass  # raises what a block raised


def _rows_per_block(weight: Weight) -> int:
    """How many rows are encoded at a time."""
    rows, columns = weight.shape
    return rows if weight.whole else max(1, BLOCK // columns)


@contextmanager
def single_threaded_torch(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool in which every thread is one of PyTorch's, which would else start as many again for each operation."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _write_block(descriptor: int, weight: Weight, row: int, source: Path) -> None:
    """Reads, encodes and writes the rows of a block that starts at `row`."""
    count, columns = min(_rows_per_block(weight), weight.shape[0] - row), weight.shape[1]
    found = [_rows_of(tensor, row, count, source) for tensor in weight.tensors]
    rows = (found[0] if len(found) == 1 else torch.cat(found, dim=1)).reshape(count, columns).contiguous()
    if weight.scale is None:
        data, magnitude = quantize.to_fp16(rows)
    else:
        data, scale, magnitude = quantize.to_int8(rows)
        blob.write_at(descriptor, scale.numpy().data, weight.scale + 2 * row)
    if not quantize.fits_fp16(magnitude):
        label = weight.tensors[0].label
        raise CheckpointError(f"{label}: holds values over {FP16_MAX:.0f}, which fp16 programs can't")
    blob.write_at(descriptor, data.numpy().data, weight.data + data.itemsize * row * columns)


def _rows_of(tensor: plan.Tensor, row: int, count: int, source: Path) -> torch.Tensor:
    """Rows [row, row + count) of a block; all of them where they do not lie one after the other."""
    if len(tensor.shape) == 1 or _is_scattered(tensor):
        return turned(_read(tensor, 0, tensor.stored[0], source), tensor.source, beside(tensor, source))
    first = tensor.source.rows[0] if tensor.source.rows else 0
    stored = _read(tensor, first + row, count, source)
    return turned(stored, replace(tensor.source, rows=None), beside(tensor, source))


def _is_scattered(tensor: plan.Tensor) -> bool:
    """Whether a block's rows do not lie one after the other, or depend on all of them."""
    source = tensor.source
    strided = source.rows is not None and source.rows[2] != 1
    return source.transposed or strided or source.repeat > 1 or bool(source.magnitude)


def _read(tensor: plan.Tensor, row: int, count: int, source: Path) -> torch.Tensor:
    """Rows [row, row + count) of a block's bytes as they lie in the checkpoint: [count, ...]."""
    dtype, rest = DTYPES[tensor.dtype], tensor.stored[1:]
    stride = math.prod(rest) * dtype.itemsize
    raw = np.empty(count * stride, np.uint8)
    with (source / tensor.file).open("rb", buffering=0) as stream:
        stream.seek(tensor.start + row * stride)
        if stream.readinto(raw.data) != raw.size:
            raise CheckpointError(f"{tensor.file}: ends within {tensor.label}; fetch it again")
    return torch.from_numpy(raw).view(dtype).reshape(count, *rest)
