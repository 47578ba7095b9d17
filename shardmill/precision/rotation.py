"""An orthogonal matrix that mixes channels: after it, no channel of a hidden state is much larger than the others.

    Q = S1 H P S2 H

H is a Hadamard matrix on blocks of channels, S1 and S2 are random signs, and P deals each block's channels out to all
blocks. Everything is a sum or a product of two numbers at a time in fp64, in an order that stands here, so the result
is the same to the bit on every machine. Where one block holds all channels, Q = S1 H.
Source: https://arxiv.org/abs/2404.00456 (QuaRot), which multiplies with one Hadamard matrix of the whole width.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

ROWS = 4096  # that are mixed at a time, in fp64


def rotated(rows: Tensor) -> Tensor:
    """rows Q, for rows [n, d] in any float dtype: fp32 [n, d]."""
    return torch.cat([_mixed(block.double()).float() for block in torch.split(rows, ROWS)])


def rotated_outputs(matrix: Tensor) -> Tensor:
    """Q^T matrix, for a matrix [d, c] that gives what is to be rotated: fp32 [d, c]."""
    return rotated(matrix.T).T.contiguous()


def _mixed(x: Tensor) -> Tensor:
    """x Q in fp64, [n, d]."""
    n, d = x.shape
    block = d & -d  # the largest power of two that divides d
    x = _hadamard(x * _signs(d, 1), block)
    if block == d:
        return x
    dealt = x.view(n, d // block, block).transpose(1, 2).reshape(n, d)
    return _hadamard(dealt * _signs(d, 2), block)


def _hadamard(x: Tensor, block: int) -> Tensor:
    """Each block of channels times the orthogonal Hadamard matrix of its width, [n, d]."""
    n, d = x.shape
    half = 1
    while half < block:
        a, b = x.view(n, d // (2 * half), 2, half).unbind(dim=2)
        x = torch.stack([a + b, a - b], dim=2).view(n, d)
        half *= 2
    return x * float(block**-0.5)


def _signs(d: int, which: int) -> Tensor:
    """d random signs, always the same."""
    drawn = hashlib.shake_256(f"rotation {which}".encode()).digest(-(-d // 8))
    return torch.from_numpy(np.unpackbits(np.frombuffer(drawn, np.uint8))[:d].astype(np.float64) * 2 - 1)
