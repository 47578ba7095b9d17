"""Products with constant matrices, and in fp16 mode all products and sums.

In fp16 mode, products and sums whose order of summation depends on shapes are added up in float64. Otherwise the last
bit of a token's result would sometimes depend on how many tokens are fed in the same pass. torch adds in another order
then, and the one rounding to fp16 may go the other way. In float64 the order no longer matters.

Products with constant matrices are 1x1 convolutions, linear layers, and every product whose matrix is large and left
as it is stored (stored.py).

A stored matrix is never expanded to float32 as a whole. There are three ways to multiply it:
- Weights of int8 in fixed point (fixed_point.py), which is exact until the last step rounds.
- Weights of fp16, or rounded to fp16, by a kernel that reads fp16 (fp16_weights.py).
- In blocks of rows, each expanded to float32 by the thread that multiplies it. This way is taken if inputs or weights
  are not finite, where a processor lacks a kernel, and for many rows in float32 where fixed point is slower.

Products in floating point are computed in blocks of rows, also those with matrices that are not stored. The blocks
follow from the matrix alone, so the number of threads changes no bit of a result (pieces.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from portable_coreml.run.fixed_point import FixedPoint, fixed_point_product, takes_so_many, to_fixed_point
from portable_coreml.run.fp16_weights import fp16_product, may_be_copied
from portable_coreml.run.lowered import Arg, Const
from portable_coreml.run.ops import KERNELS, Kernel
from portable_coreml.run.pieces import in_pieces, one_thread
from portable_coreml.run.stored import StoredMatrix

BLOCK = 3 << 17  # elements of a stored matrix multiplied by one thread at a time: expanded, they stay in a core's cache
_FEW = 64  # outputs, four of the widest vectors: for fewer, MKL adds up the first of four rows in another way
_PIECE = 1 << 21  # elements of another matrix: with fewer the calls cost more than the threads gain


def product(matrix: StoredMatrix | Tensor, x: Tensor, steady: bool) -> Tensor:
    """Return matrix @ x, [out, n] in float32, for x [in, n] in float32. A tensor is best held column by column.

    `steady`: a column's result is the same whatever n is, to the last bit.
    """
    if isinstance(matrix, StoredMatrix):
        return _stored_product(matrix, x.contiguous(), steady)
    if x.shape[1] == 1 and not steady:
        return times_vector(matrix, x[:, 0]).unsqueeze(1)
    tokens = steady_tokens(x.t()) if steady else x.t()
    return times_tokens(matrix, tokens, steady=steady)[: x.shape[1]].t()


def times_vector(matrix: Tensor, x: Tensor) -> Tensor:
    """Return matrix [out, in] @ x [in]."""
    if matrix.numel() <= _PIECE:
        with one_thread():
            return torch.mv(matrix, x)
    out = torch.empty(len(matrix))

    def multiply(first: int, last: int) -> None:
        torch.mv(matrix[first:last], x, out=out[first:last])

    in_pieces(multiply, len(matrix), _PIECE // len(x) or 1)
    return out


def times_tokens(matrix: Tensor, tokens: Tensor, *, steady: bool) -> Tensor:
    """Return tokens [n, in] @ matrix.T, [n, out]."""
    if matrix.numel() <= _PIECE:
        with one_thread():
            return _steady_mm(tokens, matrix.t()) if steady else torch.mm(tokens, matrix.t())
    out = torch.empty(len(tokens), len(matrix))

    def multiply(first: int, last: int) -> None:
        rows, some = matrix[first:last].t(), out[:, first:last]
        if steady:
            _steady_mm(tokens, rows, some)
        else:
            torch.mm(tokens, rows, out=some)

    in_pieces(multiply, len(matrix), _PIECE // matrix.shape[1] or 1)
    return out


def _steady_mm(tokens: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Return tokens [n, in] @ rows [in, out] for `steady_tokens`; a token's bits do not depend on the others."""
    if rows.shape[1] >= _FEW and blas_is_steady():
        return torch.mm(tokens, rows, out=out)
    out = torch.empty(len(tokens), rows.shape[1]) if out is None else out
    for token, result in zip(tokens, out, strict=True):
        result.copy_(torch.mv(rows.t(), token.clone()))  # some kernels ask where in memory their input lies
    return out


@cache
def blas_is_steady() -> bool:
    """Return whether BLAS adds up a row in one way, among four or among many, and first or last among four.

    MKL's kernels without AVX do not.
    """
    generator = torch.Generator().manual_seed(0)
    for out, width in ((67, 640), (187, 2100), (192, 640)):
        matrix, tokens = torch.randn(out, width, generator=generator), torch.randn(64, width, generator=generator)
        for rows in (matrix.t(), by_columns(matrix).t()):
            with one_thread():
                whole = torch.mm(tokens, rows)
                some = [*((0, n) for n in range(4, 36, 4)), (1, 5), (2, 6), (3, 7), (60, 64)]
                if not all(torch.equal(torch.mm(tokens[i:n], rows), whole[i:n]) for i, n in some):
                    return False
    return True


def steady_tokens(tokens: Tensor) -> Tensor:
    """Return [n, in] as `_steady_mm` takes them: by fours, if BLAS multiplies several at a time."""
    return _by_fours(tokens) if blas_is_steady() else tokens


def _by_fours(tokens: Tensor) -> Tensor:
    """Return [n, in] with rows added so that n is a multiple of 4: fewer than 4 rows are added up in other ways."""
    missing = -len(tokens) % 4
    if len(tokens) == 1:
        return tokens.expand(4, -1)
    return torch.nn.functional.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def _stored_product(matrix: StoredMatrix, x: Tensor, steady: bool) -> Tensor:
    """Return the product with a stored matrix; in fixed point and in fp16 it is steady in any case."""
    if takes_fixed_point(matrix, x.shape[1]):
        rows = to_fixed_point(x.t())
        if rows is not None:
            return matrix_in_fixed_point(matrix, rows).t()
    product = _in_fp16(matrix, x) if _has_fp16_weights(matrix) and may_be_copied(matrix.packed) else None
    if product is None:
        product = _blockwise(matrix, x, steady)
        matrix.packed.give_back()
    return product


def _has_fp16_weights(matrix: StoredMatrix) -> bool:
    """Return whether each weight is an fp16 number."""
    return matrix.half if matrix.scale is not None else matrix.values.dtype == torch.float16


def takes_fixed_point(matrix: StoredMatrix | Tensor, count: int) -> bool:
    """Return whether `count` columns are multiplied in fixed point with a matrix here."""
    if not isinstance(matrix, StoredMatrix) or matrix.scale is None or matrix.half:
        return False
    return matrix.values.dtype == torch.int8 and takes_so_many(count)


def matrix_in_fixed_point(matrix: StoredMatrix, rows: FixedPoint) -> Tensor:
    """Return rows @ matrix.T, [n, out] in float32."""
    assert matrix.scale is not None
    return fixed_point_product(matrix.values, matrix.scale, matrix.packed, rows)


class _Scratch(threading.local):
    """Memory that a thread expands one block after another into: fresh memory is paid for page by page."""

    def __init__(self) -> None:
        self.kept: dict[torch.dtype, Tensor] = {}

    def get(self, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """Return [rows, columns] of any contents, which this thread's next call gives away again."""
        size = rows * columns
        buffer = self.kept.get(dtype)
        if buffer is None or len(buffer) < size:
            with torch.inference_mode(False):  # what is made in that mode can't be written outside it
                buffer = self.kept[dtype] = torch.empty(max(size, BLOCK), dtype=dtype)
        return buffer[:size].view(rows, columns)


_scratch = _Scratch()


def _blockwise(matrix: StoredMatrix, x: Tensor, steady: bool) -> Tensor:
    """Return the product in float32, computed a block of rows at a time."""
    values, scale = matrix.values, matrix.scale
    tokens = (steady_tokens(x.t()) if steady else x.t()).contiguous()  # [n, in]
    out = torch.empty(len(tokens), len(values))

    def multiply(first: int, last: int) -> None:
        block = _expanded(matrix, first, last)
        if steady:
            _steady_mm(tokens, block.t(), out[:, first:last])
        else:
            torch.mm(tokens, block.t(), out=out[:, first:last])

    in_pieces(multiply, len(values), BLOCK // len(x) or 1)
    if scale is not None and not matrix.half:
        out.mul_(scale.t())  # after the sums: the results are fewer than the weights
    return out[: x.shape[1]].t()


def _in_fp16(matrix: StoredMatrix, x: Tensor) -> Tensor | None:
    """Return the product with a matrix whose weights are fp16 numbers; None if one of them is not finite."""
    rows = _by_fours(x.t()).contiguous()
    product = fp16_product(rows, len(matrix.values), partial(_expanded, matrix), matrix.packed)
    return None if product is None else product[: x.shape[1]].t()


def _expanded(matrix: StoredMatrix, first: int, last: int) -> Tensor:
    """Return rows of a matrix in float32, in this thread's scratch memory.

    Scales are left to the caller if weights are not rounded.
    """
    width = matrix.values.shape[1]
    block = _scratch.get(torch.float32, last - first, width).copy_(matrix.values[first:last])
    if matrix.scale is not None and matrix.half:
        block.mul_(matrix.scale[first:last])
        block.copy_(_scratch.get(torch.float16, last - first, width).copy_(block))
    return block


def _pointwise(x: Tensor, weight: StoredMatrix | Tensor, bias: Tensor | None, *_: Any, steady: bool) -> Tensor:
    """Return a 1x1 convolution; a weight that is a tensor is [out, in, 1, ...]."""
    columns = x.movedim(1, 0)  # [in, batch, *space]
    matrix = weight.flatten(1) if isinstance(weight, Tensor) else weight
    y = product(matrix, columns.reshape(len(columns), -1), steady).reshape(-1, *columns.shape[1:]).movedim(0, 1)
    return y if bias is None else y + bias.view(-1, *[1] * (x.dim() - 2))


def linear(x: Tensor, weight: StoredMatrix | Tensor, bias: Tensor | None, *, steady: bool) -> Tensor:
    """Return x @ weight.T + bias."""
    y = product(weight, x.float().reshape(-1, x.shape[-1]).t(), steady).t().reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def matmul(x: Tensor, y: StoredMatrix, transpose_x: bool, transpose_y: bool, *, steady: bool) -> Tensor:
    """Return x @ y."""
    return linear(x.mT if transpose_x and x.dim() > 1 else x, y, None, steady=steady)


WEIGHTS = {"conv": "weight", "linear": "weight", "matmul": "y"}  # the argument that may be a constant matrix
_CALLS: dict[str, Callable[..., Tensor]] = {"conv": _pointwise, "linear": linear, "matmul": matmul}


def product_kernel(kind: str, stored: bool, steady: bool) -> Kernel:
    """Return the kernel of an operation in WEIGHTS that takes its weight as a StoredMatrix or as a tensor."""
    name = f"{'stored' if stored else 'steady' if steady else 'plain'}_{kind}"
    return Kernel(name, partial(_CALLS[kind], steady=steady), KERNELS[kind].params)


def by_columns(weight: Tensor) -> Tensor:
    """Return [out, in, ...] held column by column.

    With it a product with four columns takes little longer than with one.
    """
    return weight.flatten(1).t().contiguous().t().view(weight.shape)


def output_axis(kind: str, args: Mapping[str, Arg], sizes: Sequence[int | None]) -> int | None:
    """Return the axis that holds the output channels in an operation's weight, whose shape is `sizes`.

    None if the operation is more than a product with a matrix: a window, strides, groups, a batch of weights.
    """
    plain = {name: arg.value if isinstance(arg, Const) else ... for name, arg in args.items()}
    if kind == "conv":
        return 0 if len(sizes) > 2 and set(sizes[2:]) == {1} and _is_pointwise(plain) else None
    if len(sizes) != 2:
        return None
    return 0 if kind == "linear" or plain["transpose_y"] else 1


def _is_pointwise(plain: Mapping[str, Any]) -> bool:
    """Return whether plain arguments make a one-element convolution a plain product.

    No stride, no padding, no groups.
    """
    strides, pad = plain["strides"], plain["pad"] if plain["pad_type"] == "custom" else None
    known = ... not in (strides, pad, plain["pad_type"], plain["groups"])
    return known and plain["groups"] == 1 and not any(s != 1 for s in strides or ()) and not any(pad or ())


_KINDS = (
    "einsum",
    "matmul",
    "reduce_l2_norm",
    "reduce_mean",
    "reduce_sum",
    "reduce_sum_square",
    "scaled_dot_product_attention",
)


def _widened(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel that computes in float64; its result is rounded from there."""

    def wide(*values: Any) -> Tensor:
        return call(*(_double(value) for value in values))

    return wide


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [_double(item) for item in value]
    return value


WIDE = {kind: Kernel(f"wide_{kind}", _widened(KERNELS[kind].call), KERNELS[kind].params) for kind in _KINDS}
