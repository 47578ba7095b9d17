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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardmill import plan
from shardmill.convert import blob, quantize
from shardmill.convert.template.pattern import StampError
from shardmill.convert.template.program import main_block
from shardmill.convert.weights import DTYPES, FP16_MAX, turned
from shardmill.errors import CheckpointError
from shardmill.models.contract import stem

BLOCK = 1 << 18  # weights: the fp32 block and its scratch copies stay in a core's cache


@dataclass(frozen=True)
class Weight:
    """A tensor and the offsets at which it goes into a file: fp16, or int8 with one fp16 scale per row."""

    tensor: plan.Tensor
    data: int
    scale: int | None = None

    @property
    def columns(self) -> int:
        """Of the constant; a vector is one row."""
        return 1 if self.tensor.source.column is not None else self.tensor.stored[-1]

    @property
    def stride(self) -> int:
        """Numbers of a row in the checkpoint."""
        return self.tensor.stored[-1]

    @property
    def rows(self) -> int:
        return math.prod(self.tensor.stored) // self.stride


def place(spec: Any, part: plan.Part) -> tuple[list[blob.Blob], list[Weight]]:
    """Gives every weight of the program its place in the weight file, in the order of use, and says what goes there.

    Raises StampError where the program's weights are not the part's tensors.
    """
    sites = list(weight_sites(spec))
    blobs = blob.lay_out([_kind_and_size(value) for _, values in sites for value in values])
    tensors, left, weights = {stem(t.path): t for t in part.tensors}, iter(blobs), []
    for name, values in sites:
        placed = [next(left) for _ in values]
        for value, where in zip(values, placed, strict=True):
            value.blobFileValue.offset = where.offset
        if name not in tensors or not _holds(extents(values[0]), tensors[name].shape):
            raise StampError(f"{name}: the program's weight of {extents(values[0])} is no tensor of {part.name}")
        weights.append(Weight(tensors.pop(name), *(where.data for where in placed)))
    if tensors:
        raise StampError(f"{min(tensors)}: a tensor of {part.name} that its program does not use")
    return blobs, weights


def _holds(extents: list[int], shape: tuple[int, ...]) -> bool:
    """Whether a tensor fills a constant, or the first rows of one whose other rows are zeros."""
    size, wanted = math.prod(extents), math.prod(shape)
    return size == wanted or (extents[0] > shape[0] and size // extents[0] * shape[0] == wanted)


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


def write(file: Path, blobs: list[blob.Blob], weights: list[Weight], source: Path, threads: int) -> None:
    """Writes the weight file. Raises CheckpointError for a weight that fp16 can't hold, or a file that is too short."""
    with created(file) as descriptor:
        blob.write_records(descriptor, blobs)
        stream(descriptor, weights, source, threads)


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
    jobs = [(weight, row) for weight in weights for row in range(0, weight.rows, _rows_per_block(weight))]
    with single_threaded_torch(threads) as pool:
        for _ in pool.map(lambda job: _write_block(descriptor, job[0], job[1], source), jobs):
            pass  # raises what a block raised


def _rows_per_block(weight: Weight) -> int:
    """How many rows are encoded at a time."""
    return max(1, BLOCK // weight.stride)


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
    rows = turned(read_rows(weight, row, min(_rows_per_block(weight), weight.rows - row), source), weight.tensor.source)
    if weight.scale is None:
        data, magnitude = quantize.to_fp16(rows)
    else:
        data, scale, magnitude = quantize.to_int8(rows)
        blob.write_at(descriptor, scale.numpy().data, weight.scale + 2 * row)
    if not quantize.fits_fp16(magnitude):
        raise CheckpointError(f"{weight.tensor.label}: holds values over {FP16_MAX:.0f}, which fp16 programs can't")
    blob.write_at(descriptor, data.numpy().data, weight.data + data.itemsize * row * weight.columns)


def read_rows(weight: Weight, row: int, count: int, source: Path) -> torch.Tensor:
    """Rows [row, row + count) as they lie in the checkpoint: [count, stride]."""
    tensor = weight.tensor
    dtype = DTYPES[tensor.dtype]
    stride = weight.stride * dtype.itemsize
    raw = np.empty(count * stride, np.uint8)
    with (source / tensor.file).open("rb", buffering=0) as stream:
        stream.seek(tensor.start + row * stride)
        if stream.readinto(raw.data) != raw.size:
            raise CheckpointError(f"{tensor.file}: ends within {tensor.label}; fetch it again")
    return torch.from_numpy(raw).view(dtype).reshape(count, weight.stride)
