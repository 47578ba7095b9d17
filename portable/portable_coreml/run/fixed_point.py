"""Multiplies int8 matrices with rows of inputs in fixed point, exactly, by the fastest kernel that this processor has.

A row of inputs is a row of integers of 31 bits times a power of two. The integers are cut into signed digits. A kernel
multiplies digits with the int8 matrix in integers, and the digits' sums are put together in float64, which holds the
whole sum. Only the last step rounds. So the error is smaller than a float32 product's, and neither the number of rows,
nor the number of threads, nor the kernel changes a bit of a result.

There are three kernels:
- oneDNN's, by `torch._int_mm`, where the processor has VNNI: digits of 8 bits, and the matrix as it is stored.
- FBGEMM's, which reads a packed copy of the matrix. Without VNNI it adds up two products in 16 bits, and saturates.
  Two products of digits of 7 bits fit. A copy is made once a matrix has been multiplied often enough to earn it.
- A product in float64, before there is such a copy where VNNI is missing.

FBGEMM is for few rows: it is limited by how fast it reads the matrix. Many rows take oneDNN's kernel, or blocks in
float32 (products.py) where VNNI is missing.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from portable_coreml.run.packed import Packed
from portable_coreml.run.pieces import all_threads, in_pieces, one_thread

FEW = 8  # rows: with more, blocks in float32 are faster than FBGEMM without VNNI
EARNED = 2  # products: a packed copy takes as long as four or five in float64, or twenty of FBGEMM's
TILE = 128  # rows that oneDNN multiplies at a time: the sums of more would take much memory and leave the cache
_PIECE = 1 << 24  # elements of a packed copy: a larger one can be made by several threads
_BLOCK = 3 << 16  # elements multiplied in float64 at a time: expanded, they stay in a core's cache
_MOST_INPUTS = 1 << 16  # terms of a sum: 2^16 products of 2^30 and 2^7 are exact in float64
_EXACT = float(1 << 24)  # FBGEMM gives its sums in float32, which holds integers up to this one
_POINT = 30  # bits after the binary point of an input's integer
_LEAST = -90  # least exponent of a row of inputs: programs do not compute with smaller numbers
_FASTER = 1.2  # times, below which a copy is not worth its memory


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """Rows in fixed point, in numpy, whose calls on so few numbers take a third of torch's time.

    Attributes:
        integers: [n, in] in int32, at most 2^30 in magnitude.
        exponent: [n] in int32, the exponent of the power of two that multiplies each row.
    """

    integers: np.ndarray
    exponent: np.ndarray

    def rows(self, some: slice) -> FixedPoint:
        """Return some of the rows."""
        return FixedPoint(self.integers[some], self.exponent[some])

    def digits(self, bits: int) -> np.ndarray:
        """Return the digits [n, digits, in] in int32, least first, from -2^(bits - 1) to 2^(bits - 1) - 1."""
        cuts = _cuts(bits)
        digits: np.ndarray = (self.integers + cuts.raised)[:, None] >> cuts.shifts
        digits &= cuts.masks
        digits -= cuts.centres
        return digits

    def weights(self, bits: int) -> Tensor:
        """Return what each digit is multiplied with, [n, 1, digits] in float64."""
        return torch.from_numpy(np.exp2(_cuts(bits).exponents + self.exponent[:, None]))[:, None]

    @cached_property
    def for_fbgemm(self) -> tuple[Tensor, Tensor]:
        """Return FBGEMM's digits [n * digits, in] in float32, and their weights; products share them."""
        bits = fbgemm_bits()
        return _flat(self.digits(bits), np.float32), self.weights(bits)


@dataclass(frozen=True)
class _Cuts:
    """How integers are cut into digits: columns [digits, 1], what is added before, and each digit's exponent."""

    shifts: np.ndarray
    masks: np.ndarray
    centres: np.ndarray
    raised: np.int32
    exponents: np.ndarray


@cache
def _cuts(bits: int) -> _Cuts:
    """Return how integers are cut into digits of `bits` bits."""
    lower = range(0, 31 - bits, bits)  # where all digits but the last begin; the last has its sign from the integer
    half = 1 << (bits - 1)
    shifts, masks = [*lower, len(lower) * bits], [*(2 * half - 1 for _ in lower), -1]
    columns = [np.array(numbers, np.int32)[:, None] for numbers in (shifts, masks, [*(half for _ in lower), 0])]
    return _Cuts(
        columns[0], columns[1], columns[2], np.int32(sum(half << at for at in lower)), np.array(shifts, np.float64)
    )


def to_fixed_point(rows: Tensor) -> FixedPoint | None:
    """Return rows [n, in] in fixed point; None without rows, with too long rows, or with a number not finite."""
    if not 0 < rows.shape[1] <= _MOST_INPUTS or not len(rows):
        return None
    numbers = rows.numpy()
    top = np.maximum.reduce(np.abs(numbers), 1).tolist()  # for few rows, plain numbers take less time than arrays
    if not math.isfinite(sum(top)):
        return None
    exponent = np.array([max(math.frexp(most)[1], _LEAST) - _POINT for most in top])  # |x| < 2^(exponent + _POINT)
    scaled = numbers * np.exp2(-exponent.astype(np.float32))[:, None]
    return FixedPoint(np.rint(scaled, out=scaled).astype(np.int32), exponent)


def multiplies_in_fixed_point() -> bool:
    """Return whether this processor has a kernel that is fast and exact."""
    return vnni_is_used() or fbgemm_bits() > 0


def takes_so_many(count: int) -> bool:
    """Return whether `count` rows are multiplied faster in fixed point than in float32."""
    return vnni_is_used() or (count <= FEW and fbgemm_bits() > 0)


def fixed_point_product(values: Tensor, scale: Tensor, packed: Packed, rows: FixedPoint) -> Tensor:
    """Return rows @ (values * scale).T, [n, out] in float32, for values [out, in] in int8 and scale [out, 1]."""
    pieces = packed.earned(EARNED, lambda: _pack(values)) if len(rows.integers) <= FEW and packs() else ()
    if pieces:
        return _by_fbgemm(pieces, values, scale, rows)
    return _by_onednn(values, scale, rows) if vnni_is_used() else _in_float64(values, scale, rows)


def _by_onednn(values: Tensor, scale: Tensor, rows: FixedPoint) -> Tensor:
    """Return the product, computed a tile of rows at a time."""
    out = torch.empty(len(rows.integers), len(values))
    for first in range(0, len(out), TILE):
        tile = rows.rows(slice(first, first + TILE))
        digits = _flat(tile.digits(8), np.int8)
        with all_threads():
            _put_together(torch._int_mm(digits, values.t()), tile.weights(8), scale, out[first : first + TILE])
    return out


def _by_fbgemm(pieces: tuple[Any, ...], values: Tensor, scale: Tensor, rows: FixedPoint) -> Tensor:
    """Return the product, computed a piece of the matrix's rows at a time."""
    bits, size, first = fbgemm_bits(), _piece(values), 0
    digits, weights = rows.for_fbgemm
    out = torch.empty(len(rows.integers), len(values))
    with all_threads():
        for piece in pieces:
            some = slice(first, first := first + size)
            sums = _fbgemm(digits, bits, piece)
            if _may_round(bits, values.shape[1]) and float(sums.abs().max()) > _EXACT:
                out[:, some] = _in_float64(values[some], scale[some], rows)
            else:
                _put_together(sums, weights, scale[some], out[:, some])
    return out


def _put_together(sums: Tensor, weights: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write the product [n, out] from the sums [n * digits, out] of each digit and the digits' weights."""
    total = torch.bmm(weights, sums.view(len(weights), -1, sums.shape[1]).double())  # exact, so in any order
    torch.mul(total[:, 0], scale.t(), out=out)


def _in_float64(values: Tensor, scale: Tensor, rows: FixedPoint) -> Tensor:
    """Return the product, a block of the matrix's rows at a time in float64, which rounds none of these sums."""
    numbers = torch.from_numpy(rows.integers * np.exp2(rows.exponent.astype(np.float64))[:, None])
    out = torch.empty(len(numbers), len(values))

    def multiply(first: int, last: int) -> None:
        total = torch.mm(numbers, values[first:last].double().t())
        torch.mul(total, scale[first:last].t(), out=out[:, first:last])

    in_pieces(multiply, len(values), _BLOCK // values.shape[1] or 1)
    return out


def _flat(digits: np.ndarray, dtype: Any) -> Tensor:
    """Return digits [n, digits, in] as [n * digits, in]."""
    return torch.from_numpy(digits.astype(dtype).reshape(-1, digits.shape[2]))


@cache
def vnni_is_used() -> bool:
    """Return whether oneDNN's int8 products are fast and exact."""
    return int8_products_are_fast() and int8_products_are_exact()


@cache
def int8_products_are_fast() -> bool:
    """Return whether this processor has VNNI.

    Without it torch (2.13) multiplies int8 in a loop, up to 160 times slower.
    """
    return torch.cpu._is_vnni_supported()


@cache
def int8_products_are_exact() -> bool:
    """Return whether int8 products are added without saturating: oneDNN's kernels without VNNI add pairs in 16 bits."""
    left = torch.tensor([127, -127], dtype=torch.int8).repeat_interleave(128)[:, None].expand(-1, 1024).contiguous()
    right = torch.tensor([-128, 127] * 2, dtype=torch.int8).expand(1024, -1).contiguous()
    expected = torch.matmul(left.to(torch.float64), right.to(torch.float64))
    return bool((torch._int_mm(left, right) == expected).all())


@cache
def fbgemm_bits() -> int:
    """Return the bits of the digits that FBGEMM multiplies exactly here: 8, 7 without VNNI, 0 where it is missing."""
    values = torch.tensor([-128, 127], dtype=torch.int8).repeat_interleave(128)[:, None].expand(-1, 256).contiguous()
    for bits in (8, 7):
        least, most = -(1 << bits - 1), (1 << bits - 1) - 1
        digits = torch.tensor([least, most, least, most]).float()[:, None].expand(-1, 256).contiguous()
        digits[2:, ::2] = 0.0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch (2.13) says once that its quantised types will go
                (piece,) = _pack(values)
            products = _fbgemm(digits, bits, piece)
        except (AttributeError, RuntimeError):  # another processor, or a torch without it
            return 0
        if torch.equal(products.double(), torch.mm(digits.double(), values.double().t())):
            return bits
    return 0


def _fbgemm(digits: Tensor, bits: int, piece: Any) -> Tensor:
    """Return digits [n, in] in float32 times a packed copy, [n, out] in float32."""
    sums: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(digits, 1.0, 1 << bits - 1, piece)
    return sums


def _may_round(bits: int, inputs: int) -> bool:
    """Return whether `inputs` products of a digit and an int8 number may add up to more than float32 holds."""
    return inputs << (bits - 1 + 7) > _EXACT


def _piece(values: Tensor) -> int:
    """Return how many rows of a matrix each packed copy holds."""
    return max(1, _PIECE // values.shape[1])


def _pack(values: Tensor) -> tuple[Any, ...]:
    """Return FBGEMM's copies of a matrix [out, in], each of `_piece` rows."""
    size = _piece(values)
    made: list[Any] = [None] * -(-len(values) // size)

    def pack(first: int, last: int) -> None:
        quantised = torch._make_per_tensor_quantized_tensor(values[first:last].contiguous(), 1.0, 0)
        made[first // size] = torch.ops.quantized.linear_prepack(quantised, None)

    in_pieces(pack, len(values), size)
    return tuple(made)


@cache
def packs() -> bool:
    """Return whether FBGEMM is faster than oneDNN's kernel here, by enough to be worth a copy's memory.

    Results do not depend on the answer, so it may be found with a stop-watch.
    """
    if not vnni_is_used() or not fbgemm_bits():
        return fbgemm_bits() > 0
    with one_thread(), ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as alone:
        return alone.submit(_copy_is_faster).result()


def _copy_is_faster() -> bool:
    """Return whether a product with a packed copy takes clearly less of this thread's time than oneDNN's.

    Only the processor's time in this thread counts, on one thread: what else the machine does changes no answer.
    """
    values, scale, packed = torch.ones(2048, 1024, dtype=torch.int8), torch.ones(2048, 1), Packed()
    rows = FixedPoint(np.ones((1, 1024), np.int32), np.zeros(1, np.int32))
    packed.pieces = _pack(values)
    ways: list[Callable[[], Tensor]] = [
        lambda: _by_onednn(values, scale, rows),
        lambda: _by_fbgemm(packed.pieces, values, scale, rows),
    ]
    times = [math.inf, math.inf]
    for _ in range(8):
        for index, way in enumerate(ways):
            start = time.thread_time()
            way()
            times[index] = min(times[index], time.thread_time() - start)
    return times[0] > _FASTER * times[1]
