"""The scalar types of MIL: their names, their protobuf numbers, and how numpy and torch hold them.

A float type of the program is held in float32 (fp16 mode rounds results, see execute.py). Sub-byte integers are held
unpacked, one per byte. Unsigned types that torch can't compute with are held in the next wider signed type. torch is
imported by whoever asks for a type of it: a compiler doesn't.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ScalarType:
    """One MIL scalar type.

    Text name, protobuf number, bits when stored, numpy type of a constant, name of the torch type in flight.
    """

    name: str
    number: int
    bits: int
    numpy: np.dtype
    held: str

    @property
    def torch(self) -> torch.dtype:
        """Return the torch type in flight."""
        import torch

        dtype: torch.dtype = getattr(torch, self.held)
        return dtype


def _scalar(name: str, number: int, bits: int, numpy: type, torch_name: str) -> ScalarType:
    return ScalarType(name, number, bits, np.dtype(numpy), torch_name)


_SCALARS = (
    _scalar("bool", 1, 8, np.bool_, "bool"),
    _scalar("string", 2, 0, np.object_, "uint8"),
    _scalar("fp16", 10, 16, np.float16, "float32"),
    _scalar("fp32", 11, 32, np.float32, "float32"),
    _scalar("fp64", 12, 64, np.float64, "float64"),
    _scalar("int8", 21, 8, np.int8, "int8"),
    _scalar("int16", 22, 16, np.int16, "int16"),
    _scalar("int32", 23, 32, np.int32, "int32"),
    _scalar("int64", 24, 64, np.int64, "int64"),
    _scalar("int4", 25, 4, np.int8, "int8"),
    _scalar("uint8", 31, 8, np.uint8, "uint8"),
    _scalar("uint16", 32, 16, np.uint16, "int32"),
    _scalar("uint32", 33, 32, np.uint32, "int64"),
    _scalar("uint64", 34, 64, np.uint64, "int64"),
    _scalar("uint4", 35, 4, np.uint8, "uint8"),
    _scalar("uint2", 36, 2, np.uint8, "uint8"),
    _scalar("uint1", 37, 1, np.uint8, "uint8"),
    _scalar("uint6", 38, 6, np.uint8, "uint8"),
    _scalar("uint3", 39, 3, np.uint8, "uint8"),
)
BY_NAME = {scalar.name: scalar for scalar in _SCALARS}
BY_NUMBER = {scalar.number: scalar for scalar in _SCALARS}


def unpack_bits(packed: bytes, bits: int, count: int, signed: bool) -> np.ndarray:
    """Return `count` integers of `bits` bits each, least significant bit first, from packed bytes: one per byte."""
    flat = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[: count * bits]
    weights = (1 << np.arange(bits)).astype(np.int16)
    values = flat.reshape(count, bits).astype(np.int16) @ weights
    if signed:
        values = np.where(values >= 1 << (bits - 1), values - (1 << bits), values)
    return values.astype(np.int8 if signed else np.uint8)
