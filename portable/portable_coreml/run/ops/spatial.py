"""Rearrangements between depth, batch and space: all of them reshapes and one permutation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from portable_coreml.run.ops.registry import Ints, Pairs, kernel


@kernel("depth_to_space", exact=True)
def depth_to_space(x: Tensor, block_size: int) -> Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, block_size, block_size, c // block_size**2, h, w)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(n, c // block_size**2, h * block_size, w * block_size)


@kernel("space_to_depth", exact=True)
def space_to_depth(x: Tensor, block_size: int) -> Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // block_size, block_size, w // block_size, block_size)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(n, c * block_size**2, h // block_size, w // block_size)


@kernel("pixel_shuffle", exact=True)
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    return F.pixel_shuffle(x, upscale_factor)


@kernel("pixel_unshuffle", exact=True)
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    return F.pixel_unshuffle(x, downscale_factor)


@kernel("space_to_batch", exact=True)
def space_to_batch(x: Tensor, block_shape: Ints, paddings: Pairs) -> Tensor:
    (top, bottom), (left, right) = paddings
    x = F.pad(x, [left, right, top, bottom])
    n, c, h, w = x.shape
    b0, b1 = block_shape
    blocks = x.reshape(n, c, h // b0, b0, w // b1, b1)
    return blocks.permute(3, 5, 0, 1, 2, 4).reshape(b0 * b1 * n, c, h // b0, w // b1)


@kernel("batch_to_space", exact=True)
def batch_to_space(x: Tensor, block_shape: Ints, crops: Pairs) -> Tensor:
    (top, bottom), (left, right) = crops
    n, c, h, w = x.shape
    b0, b1 = block_shape
    blocks = x.reshape(b0, b1, n // (b0 * b1), c, h, w)
    full = blocks.permute(2, 3, 4, 0, 5, 1).reshape(n // (b0 * b1), c, h * b0, w * b1)
    return full[:, :, top : h * b0 - bottom, left : w * b1 - right]
