"""What is published of the Neural Engine's arithmetic, as options of the precision "ane".

It predicts: nothing here was measured by this project. The precision "ane" is fp16 with OPTIONS that name a deviation
each. "ane" alone has the options of DEFAULT, "ane:tables,sums" has the two that it names. docs/precision.md
compares them with the figures that their sources publish.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from portable_coreml.run.ops import Kernel
from portable_coreml.run.stored import StoredMatrix

ANE = "ane"
TABLES, SUMS, SCALES, SUBNORMALS = "tables", "sums", "scales", "subnormals"
OPTIONS = {
    # 751K, M6 report at 0dccf2e, notes/numerics.md, F3 and F3b: 33 numbers of fp16, read with linear interpolation
    TABLES: "sigmoid, silu and tanh are read from tables of 33 numbers",
    # 751K, M6 report, notes/numerics.md, MAC path and H12; the same on M4 and M6
    SUMS: "products are added in fixed point with 16 bits after the point, and 32768 is infinite",
    # cadamcat/llms-on-apple-neural-engine; Anemll/anemll-forge, ANE_DELTANET_NUMERICS.md at 117ded6, as an explanation
    SCALES: "a matrix's scales are applied after the sums",
    # Anemll/anemll-forge, ANE_DELTANET_NUMERICS.md at 117ded6; 751K found the opposite for additions and products
    SUBNORMALS: "results below 2^-14 are zero",
}
DEFAULT = frozenset({TABLES, SUMS, SCALES})
_LEAST, _LIMIT, _NORMAL = 2.0**-16, 2.0**15, 2.0**-14
_BLOCK = 1 << 22  # products held at a time, in float64
_PRODUCTS = ("conv", "linear", "matmul")


def options_of(precision: str) -> frozenset[str]:
    """Return the options of a precision; empty for "fp32" and "fp16".

    Raises:
        ValueError: for any other precision, and for an unknown option.
    """
    kind, _, named = precision.partition(":")
    options = frozenset(named.split(",")) if named else DEFAULT
    if kind != ANE and precision not in ("fp32", "fp16"):
        raise ValueError(f"precision must be fp32, fp16, {ANE} or {ANE}:OPTION,..., not {precision!r}")
    if kind == ANE and not options <= OPTIONS.keys():
        raise ValueError(f"precision {precision!r}: options are {', '.join(OPTIONS)}")
    return options if kind == ANE else frozenset()


def deviating_kernel(op: str, kernel: Kernel, options: Collection[str]) -> Kernel:
    """Return the kernel of an operation with the deviations in `options`; `kernel` itself if none concerns it."""
    made = kernel
    if TABLES in options and op in _TABLES:
        made = replace(made, kind=f"ane_{op}", call=_TABLES[op])
    elif SUMS in options and op in _PRODUCTS:
        made = replace(made, kind=f"ane_{op}", call=_summed(op, made.call))
    if SUBNORMALS in options and not made.exact:
        made = replace(made, kind=f"ane_{op}", call=_flushed(made.call))
    return made


@cache
def table(op: str) -> tuple[float, float, Tensor]:
    """Return a table: its first argument, the distance of arguments, and 33 numbers of fp16."""
    if op == "tanh":  # of the positive half; the other half is its mirror image
        return 0.0, 0.125, torch.tanh(torch.arange(33, dtype=torch.float64) / 8).half().double()
    at = torch.arange(33, dtype=torch.float64) / 2 - 8
    return -8.0, 0.5, (torch.sigmoid(at) if op == "sigmoid" else _fitted_silu(at)).half().double()


def _fitted_silu(at: Tensor) -> Tensor:
    """Return the numbers of silu's table, which the compiler fits.

    The device's table is published by its number at 0.5, 0.296, its largest error, 0.0149, and the zeros of its error.
    All agree with least squares of the whole range, in which the number at 0 is 0 and those beside it are fitted to
    their side of 0 alone.
    """
    x = torch.linspace(-8, 8, 16001, dtype=torch.float64)
    y = torch.nn.functional.silu(x)
    hats = (1 - (x[:, None] - at).abs() * 2).clamp(min=0)  # [points, 33]
    fixed = torch.zeros(33, dtype=torch.float64)
    for i, side in ((15, (x > -0.5) & (x < 0)), (17, (x < 0.5) & (x > 0))):
        fixed[i] = (hats[side, i] * y[side]).sum() / hats[side, i].square().sum()
    free = [i for i in range(33) if i not in (15, 16, 17)]
    fixed[free] = torch.linalg.lstsq(hats[:, free], (y - hats @ fixed)[:, None]).solution[:, 0]
    return fixed


def _read(op: str, x: Tensor) -> Tensor:
    """Return a table's value between its numbers, for arguments within its range."""
    first, step, numbers = table(op)
    place = ((x.double() - first) / step).clamp(0, len(numbers) - 1)
    below = place.floor().clamp(max=len(numbers) - 2)
    low, high = numbers[below.long()], numbers[below.long() + 1]
    return (low + (high - low) * (place - below)).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return torch.where(
        x.isnan(), x, torch.where(x > 8, 1.0, torch.where(x < -8, 0.0, _read("sigmoid", x.nan_to_num())))
    )


def _tanh(x: Tensor) -> Tensor:
    inside = _read("tanh", x.nan_to_num().abs())
    return torch.where(x.isnan(), x, torch.sign(x) * torch.where(x.abs() > 4, 1.0, inside))


def _silu(x: Tensor) -> Tensor:
    """Return silu from its table; beyond the table, where nothing is published, 0 or x."""
    return torch.where(x.isnan() | (x > 8), x, torch.where(x < -8, 0.0, _read("silu", x.nan_to_num())))


_TABLES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": _sigmoid, "silu": _silu, "tanh": _tanh}


def fixed_sums(x: Tensor, y: Tensor) -> Tensor:
    """Return x [.., m, k] @ y [.., k, n] as it is added in fixed point, in float64.

    A product is rounded to a multiple of 2^-16, away from zero if two are as near. It is dropped if the exponents of
    its factors add up to less than -16, where subnormal numbers count as -14. A sum of 32768 is infinite, unless
    it is a partial sum.
    """
    x, y = x.double(), y.double()
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = x.expand(*lead, *x.shape[-2:]), y.expand(*lead, *y.shape[-2:])
    out = x.new_empty(*lead, x.shape[-2], y.shape[-1])
    flat, left, right = (t.reshape(-1, *t.shape[-2:]) for t in (out, x, y))
    rows = max(1, _BLOCK // max(1, right.shape[1] * right.shape[2]))
    for i in range(len(flat)):
        down = _exponent(right[i])
        for first in range(0, left.shape[1], rows):
            some = left[i, first : first + rows]
            terms = some[:, :, None] * right[i]  # [rows, k, n]
            counted = _exponent(some)[:, :, None] + down >= -16
            flat[i, first : first + rows] = (_rounded(terms) * counted).sum(1)
    return _limited(flat).reshape(out.shape)


def _exponent(x: Tensor) -> Tensor:
    """Return the exponents of fp16 numbers, at least -14. The exponent of 0 has no meaning."""
    return torch.frexp(x).exponent.sub_(1).clamp_(min=-14)


def _rounded(x: Tensor) -> Tensor:
    scaled = x / _LEAST
    return torch.trunc(scaled + torch.copysign(torch.full_like(scaled, 0.5), scaled)) * _LEAST


def _limited(sums: Tensor) -> Tensor:
    return torch.where(sums.abs() >= _LIMIT, torch.copysign(torch.full_like(sums, torch.inf), sums), sums)


def _summed(op: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product whose sums are added in fixed point.

    With a stored matrix the terms are multiples of the inputs, so only the sum is rounded; its limit is the limit of
    the sums of codes.
    """

    def call(x: Tensor, weight: Any, *rest: Any) -> Any:
        if isinstance(weight, StoredMatrix):
            return _scaled(op, plain, x, weight, rest)
        if op == "matmul":
            turned = [t.mT if turn else t for t, turn in zip((x, weight), rest[:2], strict=True)]
            return fixed_sums(*turned).float() if min(x.dim(), weight.dim()) > 1 else plain(x, weight, *rest)
        rows = x.movedim(1, -1) if op == "conv" else x
        sums = fixed_sums(rows.reshape(-1, rows.shape[-1]), weight.flatten(1).mT).reshape(*rows.shape[:-1], -1)
        bias = rest[0]
        sums = sums if bias is None else _limited(sums + _rounded(bias.double()))
        return (sums.movedim(-1, 1) if op == "conv" else sums).float()

    return call


def _scaled(op: str, plain: Callable[..., Any], x: Tensor, matrix: StoredMatrix, rest: tuple[Any, ...]) -> Tensor:
    """Return a product with a stored matrix, whose sums, before the scales, are limited and rounded."""
    bias = rest[0] if op != "matmul" else None
    without = (None, *rest[1:]) if op != "matmul" else rest
    scale = torch.ones(len(matrix.values), 1) if matrix.scale is None or matrix.half else matrix.scale
    shape = (-1, *[1] * (x.dim() - 2)) if op == "conv" else (-1,)
    by = scale.double().reshape(shape)
    sums: Tensor = _limited(_rounded(plain(x, matrix, *without).double() / by)) * by
    return (sums if bias is None else sums + bias.double().view(shape)).float()


def _flushed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel whose results below the smallest normal number of fp16 are zero."""

    def flush(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(flush, value))
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return torch.where(value.abs() < _NORMAL, 0.0, value) if floating else value

    return lambda *values: flush(plain(*values))
