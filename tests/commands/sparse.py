"""Packages with weight files of any size that take next to no disk: their blobs lie far apart in a sparse file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from portable_coreml.files.blob import RECORD, RECORD_BYTES


def spread(package: Path, size: int) -> None:
    """Moves the blobs of a package's weight file apart until it is `size` bytes long, and the offsets with them."""
    (path,) = package.rglob("weight.bin")
    (spec_path,) = package.rglob("*.mlmodel")
    spec = load(spec_path)
    blobs = list(blob_values(spec.mlProgram))
    offsets = sorted({blob.offset for blob in blobs})
    step = (size - path.stat().st_size) // len(offsets) // RECORD_BYTES * RECORD_BYTES
    moved = {offset: offset + (i + 1) * step for i, offset in enumerate(offsets)}
    with path.open("rb") as file:
        header, pieces = file.read(RECORD_BYTES), {offset: read_blob(file, offset) for offset in offsets}
    with path.open("wb") as file:
        file.write(header)
        for offset, (sentinel, kind, data) in pieces.items():
            at = moved[offset]
            file.seek(at)
            file.write(RECORD.pack(sentinel, kind, len(data), at + RECORD_BYTES).ljust(RECORD_BYTES, b"\0") + data)
        file.truncate(size)
    for blob in blobs:
        blob.offset = moved[blob.offset]
    spec_path.write_bytes(spec.SerializeToString())


def read_blob(file: BinaryIO, offset: int) -> tuple[int, int, bytes]:
    """(sentinel, type, data) of the blob whose record stands at `offset`."""
    file.seek(offset)
    sentinel, kind, length, start = RECORD.unpack(file.read(RECORD.size))
    file.seek(start)
    return sentinel, kind, file.read(length)


def load(path: Path) -> Any:
    """The Model message in a file."""
    from coremltools.proto import Model_pb2

    return Model_pb2.Model.FromString(path.read_bytes())


def blob_values(program: Any) -> Iterator[Any]:
    """Every reference into a weight file of a program message."""
    for function in program.functions.values():
        for block in function.block_specializations.values():
            for op in block.operations:
                values = [*op.attributes.values(), *(a.value for bound in op.inputs.values() for a in bound.arguments)]
                yield from (v.blobFileValue for v in values if v.WhichOneof("value") == "blobFileValue")
