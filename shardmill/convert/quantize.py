"""Rows of a checkpoint's tensor -> the bytes of a program's weight, bit for bit as coremltools makes them.

Integers are symmetric with one scale per row (output channel). coremltools computes them on fp16 weights in fp16
arithmetic: scale = 2 * max|w| / (2 * levels), q = clip(round(w / scale), -levels, levels), each step rounded to fp16,
with 127 levels of INT8 and 7 of INT4 (coremltools/optimize/_utils.py, quantize_weight_by_dtype). Every row stands
alone, so any block of rows will do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardmill.convert.weights import FP16_MAX

INT8_LEVELS = 127


def to_fp16(rows: Tensor) -> tuple[Tensor, float]:
    """Rows of any float dtype in fp16, and their largest magnitude before rounding (NaN if there is a NaN)."""
    wide = rows.float()
    return wide.half(), float(torch.maximum(wide.amax().abs(), wide.amin().abs()))


def to_integers(rows: Tensor, levels: int = INT8_LEVELS) -> tuple[Tensor, Tensor, float]:
    """Rows [n, columns] of any float dtype as int8 [n, columns], scales [n] in fp16, and the largest magnitude.

    `levels` is the largest magnitude of an integer.
    """
    wide = rows.float()
    largest = torch.maximum(
        wide.amax(dim=1).abs(), wide.amin(dim=1).abs()
    )  # [n]; rounds to the largest of the rounded ones
    limit = largest.half()
    scale = (limit + limit) / (2 * levels)
    codes = wide.half().div_(scale[:, None]).round_().clamp_(-levels, levels)
    if not scale.all():  # 0 / 0, in a row of zeros or of numbers too small for a scale; NaN has no integer of its own
        codes.nan_to_num_(nan=0.0)
    return codes.float().to(torch.int8), scale, float(largest.max())


def fits_fp16(magnitude: float) -> bool:
    """Whether fp16 holds it; false for NaN."""
    return magnitude <= FP16_MAX
