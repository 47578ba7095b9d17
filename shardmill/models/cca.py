"""ZAYA's compressed convolutional attention (arXiv 2510.04476; transformers, models/zaya/modeling_zaya.py).

Two short convolutions mix query and key over a few tokens. A residual of the projections is added, and the sum is
normed to the length of sqrt(head_dim). Half of the value comes from the token before. The values of earlier tokens
that the convolutions and the delayed half read lie in a ring of slots by position, like a short convolution's input.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.attention import Attention, Shared
from shardmill.models.layer_constants import cca_widths
from shardmill.models.primitives import UnitNorm, add_channels, projection, read_ring, scale, vector, write_ring

Weights = Mapping[str, Tensor]


class ConvolvedAttention(Attention):
    """Attention whose query, key and value see a few earlier tokens before they meet the cache."""

    v_proj_current: nn.Module
    v_proj_delayed: nn.Module

    def __init__(self, g: Graph, kind: LayerSpec, weights: Weights, path: str) -> None:
        nn.Module.__init__(self)
        self.g, self.kind, self.sinks = g, kind, None
        self.width, self.delayed = cca_widths(g)
        for name in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "o_proj"):
            setattr(self, name, projection(weights[f"{path}{name}.weight"]))
        self.depthwise = DepthwisePair(weights, f"{path}depthwise.")
        self.grouped = GroupedPair(g, weights, f"{path}grouped.")
        gain = weights[f"{path}k_gain"].reshape(1, g.kv_heads, g.head_dim, 1)
        self.k_gain = nn.Parameter(gain, requires_grad=False)
        self.unit = UnitNorm()

    def forward(self, x: Tensor, shared: Shared, *states: Tensor) -> Tensor:
        k_cache, v_cache, *ring = states
        q, k, v = self.convolved(x, shared, ring[0])  # each [1, heads, head_dim, T]
        q, k = self.turn(q, shared).transpose(2, 3), self.turn(k, shared).transpose(2, 3)
        out: Tensor = self.o_proj(self.mixed(q, k, v.transpose(2, 3), shared, k_cache, v_cache))
        return out

    def convolved(self, x: Tensor, shared: Shared, ring: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of x [1, d, T, 1], given the ring [1, 1, channels, R]."""
        g, width = self.g, self.width
        q, k = self.q_proj(x), self.k_proj(x)
        now = torch.cat([q, k], dim=1)
        own = torch.cat([now, self.v_proj_delayed(x)], dim=1)
        if shared.rows is None:
            ring[:] = write_ring(ring, own.reshape(1, 1, width + self.delayed, -1), shared.ring_write, shared.ring_keep)
        else:
            shared.rows.append(own.reshape(1, 1, width + self.delayed, -1))
            ring = write_ring(ring, shared.rows[-1], shared.ring_write, shared.ring_keep)
        one, two = (read_ring(ring, read, width + self.delayed) for read in shared.ring_read)
        before, delayed = torch.split(one, [width, self.delayed], dim=1)
        mixed = self.grouped(self.depthwise(two[:, :width], before), self.depthwise(before, now))
        query, key = torch.split(mixed.reshape(1, g.heads + g.kv_heads, g.head_dim, -1), [g.heads, g.kv_heads], dim=1)
        q_rest, k_rest = self.residuals(q, k)
        value = torch.cat([self.v_proj_current(x), delayed], dim=1).reshape(1, g.kv_heads, g.head_dim, -1)
        return self.unit(query + q_rest), self.unit(key + k_rest) * self.k_gain, value

    def residuals(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of each query head and its key head, and of these means for each key head."""
        g = self.g
        q, k = q.reshape(1, g.heads, g.head_dim, -1), k.reshape(1, g.kv_heads, g.head_dim, -1)
        keys = [head for head in torch.split(k, 1, dim=1) for _ in range(g.group)]
        means = scale(q + torch.cat(keys, dim=1), 0.5)
        of_keys = [group.mean(dim=1, keepdim=True) for group in torch.split(means, g.group, dim=1)]
        return means, torch.cat(of_keys, dim=1)


class DepthwisePair(nn.Module):
    """A convolution of two taps on each channel by itself: before and now, each [1, channels, T, 1]."""

    tap_0: Tensor
    tap_1: Tensor

    def __init__(self, weights: Weights, path: str) -> None:
        super().__init__()
        for name in ("tap_0", "tap_1"):
            tap = weights[f"{path}{name}"].reshape(1, -1, 1, 1)
            setattr(self, name, nn.Parameter(tap, requires_grad=False))
        self.bias = vector(weights[f"{path}bias"])

    def forward(self, before: Tensor, now: Tensor) -> Tensor:
        return add_channels(self.tap_0 * before + self.tap_1 * now, self.bias)


class GroupedPair(nn.Module):
    """A convolution of two taps that mixes the channels of each head: before and now, each [1, channels, T, 1]."""

    tap_0: Tensor
    tap_1: Tensor

    def __init__(self, g: Graph, weights: Weights, path: str) -> None:
        super().__init__()
        self.shape = (1, g.heads + g.kv_heads, g.head_dim, -1)
        for name in ("tap_0", "tap_1"):
            tap = weights[f"{path}{name}"].reshape(1, g.heads + g.kv_heads, g.head_dim, g.head_dim)
            setattr(self, name, nn.Parameter(tap, requires_grad=False))
        self.bias = vector(weights[f"{path}bias"])

    def forward(self, before: Tensor, now: Tensor) -> Tensor:
        before, now = before.reshape(self.shape), now.reshape(self.shape)  # each [1, groups, head_dim, T]
        mixed = torch.matmul(self.tap_0, before) + torch.matmul(self.tap_1, now)
        return add_channels(mixed.reshape(1, self.shape[1] * self.shape[2], -1, 1), self.bias)
