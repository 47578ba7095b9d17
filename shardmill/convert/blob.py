"""Weight files (weight.bin) whose layout is known before their contents, so that blobs can be written in any order.

Layout, all little-endian, as coremltools writes it (mlmodel/src/MILBlob/Blob/StorageFormat.hpp, StorageWriter.cpp): a
header of 64 bytes (count u32, version u32 = 2); then for each blob, at the next multiple of 64, a record of 64 bytes
(sentinel u32, type u32, size in bytes u64, offset of the data u64) and the data. coremltools' own writer holds the
interpreter lock and takes one whole blob after the other, which would leave all cores but one idle.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 64
VERSION = 2
SENTINEL = 0xDEADBEEF
FP16, INT8 = 1, 4  # BlobDataType


@dataclass(frozen=True)
class Blob:
    """One blob: `offset` is that of its record, which a program names, `data` that of its first byte."""

    kind: int  # FP16 or INT8
    size: int  # bytes
    offset: int

    @property
    def data(self) -> int:
        return self.offset + ALIGNMENT

    @property
    def end(self) -> int:
        return self.data + self.size


def lay_out(sizes: Iterable[tuple[int, int]]) -> list[Blob]:
    """Places blobs of (kind, size in bytes) one after the other."""
    blobs: list[Blob] = []
    for kind, size in sizes:
        after = blobs[-1].end if blobs else ALIGNMENT
        blobs.append(Blob(kind, size, -(-after // ALIGNMENT) * ALIGNMENT))
    return blobs


def write_records(file: int, blobs: list[Blob]) -> None:
    """Writes the header and every record to an empty file, given as a descriptor; what lies between stays zero."""
    os.ftruncate(file, blobs[-1].end if blobs else ALIGNMENT)
    write_at(file, struct.pack("<II", len(blobs), VERSION), 0)
    for blob in blobs:
        write_at(file, struct.pack("<IIQQ", SENTINEL, blob.kind, blob.size, blob.data), blob.offset)


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`; safe to call from several threads."""
    left = memoryview(data).cast("B")
    while left:
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count
