"""Weight files (weight.bin) whose layout is known before their contents, so that blobs can be written in any order.

The layout is coremltools' (mlmodel/src/MILBlob/Blob/StorageFormat.hpp, StorageWriter.cpp), all little-endian. The file
begins with a header of 64 bytes (count u32, version u32 = 2). Each blob follows at the next multiple of 64: a record of
64 bytes, then the data. A record holds five fields: sentinel u32, type u32, size in bytes u64, offset of the data u64,
bits that fill up the last byte u64. Numbers of four or six bits are packed, the lowest bits of a byte first
(SubByteDataTypes.hpp). coremltools' own writer holds the interpreter lock and writes one whole blob after the other,
which would leave all cores but one idle.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
VERSION = 2
SMALLEST = 10  # numbers; coremltools writes a shorter constant into the program, not into the weight file
SENTINEL = 0xDEADBEEF
FP16, UINT8, INT8, INT4, UINT4, UINT6 = 1, 3, 4, 8, 11, 13  # BlobDataType
BITS = {FP16: 16, UINT8: 8, INT8: 8, INT4: 4, UINT4: 4, UINT6: 6}


@dataclass(frozen=True)
class WeightBlob:
    """One blob: its record, which a program refers to, begins at `offset`, and its numbers begin at `data`."""

    kind: int  # a key of BITS
    count: int  # numbers
    offset: int

    @property
    def size(self) -> int:
        """Return the size of the data in bytes."""
        return -(-self.count * BITS[self.kind] // 8)

    @property
    def padding(self) -> int:
        """Return how many bits of the last byte hold no number."""
        return 8 * self.size - self.count * BITS[self.kind]

    @property
    def data(self) -> int:
        """Return the offset of the first byte of the data."""
        return self.offset + ALIGNMENT

    @property
    def end(self) -> int:
        """Return the offset of the byte after the data."""
        return self.data + self.size


def place_blobs(contents: Iterable[tuple[int, int]]) -> list[WeightBlob]:
    """Place blobs of (kind, count of numbers) one after the other."""
    blobs: list[WeightBlob] = []
    for kind, count in contents:
        after = blobs[-1].end if blobs else ALIGNMENT
        blobs.append(WeightBlob(kind, count, -(-after // ALIGNMENT) * ALIGNMENT))
    return blobs


def write_records(file: int, blobs: list[WeightBlob]) -> None:
    """Write the header and every record to an empty file, given as a descriptor; the bytes between stay zero."""
    os.ftruncate(file, blobs[-1].end if blobs else ALIGNMENT)
    write_at(file, struct.pack("<II", len(blobs), VERSION), 0)
    for blob in blobs:
        write_at(file, struct.pack("<IIQQQ", SENTINEL, blob.kind, blob.size, blob.data, blob.padding), blob.offset)


def packed(codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Return numbers packed into `bits` bits each, the lowest bits of a byte first; zeros fill up the last byte."""
    flat = codes.view(np.uint8).ravel()
    if bits == 8:
        return flat
    whole = np.zeros(-(-len(flat) // 4) * 4, np.uint8)  # four numbers of six bits make three bytes
    whole[: len(flat)] = flat & (2**bits - 1)
    if bits == 4:
        made = whole[0::2] | whole[1::2] << 4
    else:
        a, b, c, d = whole.reshape(-1, 4).T
        made = np.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], axis=1).ravel()
    return made.astype(np.uint8, copy=False)[: -(-len(flat) * bits // 8)]


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; safe to call from several threads."""
    left = memoryview(data).cast("B")
    while left:
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count
