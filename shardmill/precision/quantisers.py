"""Quantisers of one matrix: weights and input statistics -> integer codes and a scale for each row.

The error that counts is the error of the matrix' outputs, (W - Q) H (W - Q)^T. H = X^T X sums over the inputs X that
calibration has seen. Every row is quantised independently.

GPTQ (https://arxiv.org/abs/2210.17323) is coremltools' implementation, called with H and with scales from a search. Its
default scales never clip, which makes the error of 4-bit codes up to two and a half times as large. Other attempts are
in lab/precision-measured.md. Sums are made in a fixed order as long as PyTorch runs on a single thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shardmill.convert.palette import PATTERNS, indices
from shardmill.forms.form import Form

DAMPING = 0.01  # share of the mean weight, added to each: columns with inputs that calibration has not seen count too


@dataclass(frozen=True)
class Palettes:
    """A matrix as indices and tables: `codes` [rows, columns] in uint8, `lut` [tables, entries] in fp16."""

    codes: Tensor
    lut: Tensor

    @property
    def values(self) -> Tensor:
        """Return what they stand for, in fp32 [rows, columns]."""
        groups = self.codes.reshape(len(self.lut), -1).long()
        return self.lut.float().gather(1, groups).reshape(self.codes.shape)


def palettised(weight: Tensor, form: Form, importance: Tensor | None) -> Palettes:
    """Round every number to the nearest entry of its table.

    Args:
        weight: [rows, columns] in fp32.
        form: a palette form that fits the matrix.
        importance: [columns], the weight of an error in each column; equal weights if None.
    """
    half = weight.half().numpy()
    weigh = _damped(importance) if importance is not None else np.ones(half.shape[1])
    groups = half.reshape(form.tables(len(half)), -1, half.shape[1])
    tables = [_table(group, weigh, 2**form.bits) for group in groups]
    codes = [indices(table, group.ravel()) for table, group in zip(tables, groups, strict=True)]
    return Palettes(torch.from_numpy(np.concatenate(codes).reshape(half.shape)), torch.from_numpy(np.stack(tables)))


def _damped(importance: Tensor) -> NDArray[np.float64]:
    """Return weights of columns, all positive."""
    weigh = importance.double().numpy()
    return weigh + (DAMPING * weigh.mean() or 1.0)


def _table(group: NDArray[np.float16], weigh: NDArray[np.float64], entries: int) -> NDArray[np.float16]:
    """Return a table's entries, ascending, for rows [n, columns]; the last entry is repeated to fill the table."""
    from coremltools._deps import kmeans1d

    columns = np.broadcast_to(weigh, group.shape).ravel()
    sums = np.bincount(group.view(np.uint16).ravel(), columns, PATTERNS)
    present = np.flatnonzero(sums)
    numbers, places = np.unique(present.astype(np.uint16).view(np.float16), return_inverse=True)  # 0 and -0 are one
    weights = np.bincount(places, sums[present])
    if len(numbers) <= entries:
        return np.append(numbers, np.repeat(numbers[-1:], entries - len(numbers)))
    clusters = kmeans1d.cluster(numbers.astype(np.float64), entries, weights=weights)
    return np.sort(np.array(clusters.centroids).astype(np.float16))


RATIOS = 48  # scales that are tried for each row
LEAST_RATIO = 0.5  # share of a row's largest weight; larger weights are clipped
LEAST_SCALE = 2.0**-24  # the smallest number that fp16 holds
ROWS = 64  # rows whose scales are searched at a time, so that the trials stay in the processor's caches


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantised matrix: `codes` [rows, columns] in int8, `scale` [rows] in fp16."""

    codes: Tensor
    scale: Tensor

    @property
    def values(self) -> Tensor:
        """Return what they stand for, in fp32 [rows, columns]."""
        return self.codes.float() * self.scale.float()[:, None]


def clipped(weight: Tensor, bits: int, importance: Tensor | None = None) -> QuantizedMatrix:
    """Round every weight to the nearest code, with the scale of each row that leaves the least error.

    Args:
        weight: [rows, columns] in fp32.
        bits: bits of a code.
        importance: [columns], the weight of an error in each column; equal weights if None.
    """
    weigh = torch.ones(weight.shape[1]) if importance is None else importance
    blocks = [_clipped(rows, bits, weigh) for rows in torch.split(weight, ROWS)]
    return QuantizedMatrix(torch.cat([block.codes for block in blocks]), torch.cat([block.scale for block in blocks]))


def _clipped(weight: Tensor, bits: int, weigh: Tensor) -> QuantizedMatrix:
    """Round a few rows with the best scale of each row."""
    full = weight.abs().amax(dim=1) / _largest(bits)
    best, least = full, torch.full((len(weight),), torch.inf)
    for ratio in torch.linspace(1, LEAST_RATIO, RATIOS).tolist():
        scale = _fp16(full * ratio)
        error = (_rounded(weight, scale, bits).values - weight).square_() @ weigh
        better = error < least
        best, least = torch.where(better, scale.float(), best), torch.where(better, error, least)
    return _rounded(weight, _fp16(best), bits)


def gptq(weight: Tensor, bits: int, hessian: Tensor) -> QuantizedMatrix:
    """Return the codes of GPTQ, which compensates each column's rounding in later columns, the heaviest column first.

    Args:
        weight: [rows, columns] in fp32.
        bits: bits of a code.
        hessian: H [columns, columns].
    """
    from coremltools.optimize.torch.layerwise_compression.algorithms import GPTQ, ModuleGPTQConfig

    hessian = hessian.clone()
    unseen = hessian.diagonal() == 0  # inputs that were always zero; the algorithm would set their weights to zero
    hessian.diagonal()[unseen] = hessian.diagonal().mean().clamp(min=LEAST_SCALE)
    scale = clipped(weight, bits, hessian.diagonal()).scale
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    settings = ModuleGPTQConfig(
        weight_dtype=f"uint{bits}", use_activation_order_heuristic=True, hessian_dampening=DAMPING
    )
    algorithm = GPTQ(layer, settings)
    algorithm.add_batch(torch.zeros(1, weight.shape[1]), torch.zeros(1, weight.shape[0]))
    algorithm._hessian = hessian  # the class has no parameter for a Hessian
    algorithm._quantizer.scale = scale.float()[:, None]
    algorithm._quantizer.zero_point = torch.full((len(weight), 1), 2.0 ** (bits - 1))
    algorithm._store_quantization_params(algorithm._quantizer)
    algorithm.compress()
    return _rounded(layer.weight.data, scale, bits)


def error(weight: Tensor, values: Tensor, hessian: Tensor) -> float:
    """Return the squared error of the outputs if a matrix has other values, as a share of their squares."""
    off = weight - values
    return float(((off @ hessian) * off).sum() / ((weight @ hessian) * weight).sum().clamp(min=1e-30))


def _largest(bits: int) -> int:
    """Return the largest code; the smallest code is one further from zero."""
    return int(2 ** (bits - 1) - 1)


def _rounded(weight: Tensor, scale: Tensor, bits: int) -> QuantizedMatrix:
    """Round every weight to the nearest code."""
    high = _largest(bits)
    return QuantizedMatrix((weight / scale.float()[:, None]).round_().clamp_(-high - 1, high).to(torch.int8), scale)


def _fp16(scale: Tensor) -> Tensor:
    """Return scales in fp16, as a program holds scales, all positive."""
    return scale.clamp(min=LEAST_SCALE).half()
