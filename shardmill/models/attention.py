"""Attention over the cache, or over the tokens of the pass: the inputs that layers share, and the blocks.

ZAYA's compressed convolutional attention (arXiv 2510.04476; transformers, models/zaya/modeling_zaya.py) is the same
attention after two short convolutions, which mix query and key over a few tokens. A residual of the projections is
added, and the sum is normed to the length of sqrt(head_dim). Half of the value comes from the token before. The values
of earlier tokens that the convolutions and the delayed half read lie in a ring of slots by position, like a short
convolution's input.

Shapes: x is [1, d, T, 1], with T the tokens of the pass, and what projections make of it [1, heads * head_dim, T, 1].
Heads turn as [1, heads, head_dim, T] and attend as [1, heads, T, head_dim]. Keys and values have kv_heads heads, and S
slots in place of T where they come from a cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.mixers import cca_widths, missing_projections
from shardmill.models.primitives import (
    RMSNorm,
    UnitNorm,
    add_channels,
    apply_rotary,
    attend,
    projection,
    read_ring,
    scale,
    sigmoid_by_tanh,
    vector,
)
from shardmill.models.shared import LayerCaches, Shared

Weights = Mapping[str, Tensor]


class Attention(nn.Module):
    """Attention over the cache, with the new tokens written into it first; without one, over the tokens of the pass."""

    qkv_proj: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def __init__(self, g: Graph, kind: LayerSpec, weights: Weights, path: str) -> None:
        super().__init__()
        self.g, self.kind = g, kind
        for name in ["qkv"] if g.fused else [one for one in "qkv" if one not in missing_projections(kind)]:
            role = f"{name}_proj"
            setattr(self, role, projection(weights[f"{path}{role}.weight"], weights.get(f"{path}{role}.bias")))
        if g.qk_norm:
            axis = 1 if g.qk_norm == "wide" else 2
            self.q_norm = RMSNorm(weights[f"{path}q_norm.weight"], g.rms_norm_eps, axis)
            if not kind.shares:
                self.k_norm = RMSNorm(weights[f"{path}k_norm.weight"], g.rms_norm_eps, axis)
        if g.value_norm and not kind.shares:
            self.v_norm = RMSNorm(None, g.rms_norm_eps, 2)
        self.sinks = nn.Parameter(weights[f"{path}sinks"].reshape(1, -1, 1, 1), False) if g.sinks else None
        self.o_proj = projection(weights[f"{path}o_proj.weight"], weights.get(f"{path}o_proj.bias"))
        self.gate_proj = projection(weights[f"{path}gate_proj.weight"]) if g.output_gate else nn.Identity()

    def forward(self, x: Tensor, shared: Shared, caches: LayerCaches | None = None) -> Tensor:
        q, k, v = self.fused(x, shared) if self.g.fused else self.separate(x, shared)  # each [1, heads, T, head_dim]
        y = self.mixed(q, k, v, shared, caches)
        y = y * sigmoid_by_tanh(self.gate_proj(x)) if self.g.output_gate else y
        y = scale(y, self.g.output_scale)
        out: Tensor = self.o_proj(y)
        return out + shared.adapter.attended(y) if shared.adapter else out

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared, caches: LayerCaches | None) -> Tensor:
        """Return the heads' output over the cache, [1, heads * head_dim, T, 1], after the new tokens are written."""
        if caches is not None:
            k, v = (caches.put(letter, new, *shared.writes[self.kind.mask]) for letter, new in (("k", k), ("v", v)))
        return self.attended(q, k, v, shared)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
        """Return the heads' output over keys and values, [1, heads * head_dim, T, 1]."""
        g = self.g
        # Head h = kv * group + g: the query heads of one key/value head are neighbours, so (g, t) is one axis.
        factor = g.attention_scale or g.head_dim**-0.5
        q = scale(q, factor).reshape(1, g.kv_heads, -1, g.head_dim)  # [1, kv_heads, group * T, head_dim]
        of = self.kind.mask, g.group
        y = attend(q, k, v, shared.masks[of], g.score_cap, self.sinks, shared.rows[of])
        y = y.reshape(1, g.heads, -1, g.head_dim).transpose(2, 3)  # [1, heads, head_dim, T]
        return y.reshape(1, g.heads * g.head_dim, -1, 1)

    def fused(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value from one projection; the heads of query and key are rotated together."""
        g = self.g
        turning = g.heads + g.kv_heads  # heads that rotate
        qkv = self.qkv_proj(x)
        qkv = qkv + torch.cat(shared.adapter.projected(x), dim=1) if shared.adapter else qkv
        qk, v = torch.split(qkv, [turning * g.head_dim, g.kv_heads * g.head_dim], dim=1)
        qk = qk.reshape(1, turning, g.head_dim, -1)
        qk = self.turn(qk, shared)
        q, k = torch.split(qk.transpose(2, 3), [g.heads, g.kv_heads], dim=1)
        v = v.reshape(1, g.kv_heads, g.head_dim, -1).transpose(2, 3)
        return q, k, v

    def separate(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value from separate projections, with the family's norms."""
        g = self.g
        q, k = self.q_proj(x), self.k_proj(x)  # [1, heads * head_dim, T, 1]
        added = shared.adapter.projected(x) if shared.adapter else []
        if added:
            q, k = q + added[0], k + added[1]
        if g.qk_norm == "wide":
            q, k = self.q_norm(q), self.k_norm(k)
        raw = k
        q, k = q.reshape(1, g.heads, g.head_dim, -1), k.reshape(1, g.kv_heads, g.head_dim, -1)
        if g.qk_norm == "before":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.turn(q, shared), self.turn(k, shared)
        if g.qk_norm == "after":
            q, k = self.q_norm(q), self.k_norm(k)
        v = raw if self.kind.key_is_value else self.v_proj(x)
        v = (v + added[2] if added else v).reshape(1, g.kv_heads, g.head_dim, -1)
        v = self.v_norm(v) if g.value_norm else v
        return q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)

    def turn(self, x: Tensor, shared: Shared) -> Tensor:
        """Rotate heads [1, heads, head_dim, T] if the layer has a rotary embedding."""
        if self.kind.rope is None:
            return x
        cos, sin = shared.ropes[self.kind.rope]
        return apply_rotary(x, cos, sin, (self.g.rope_dim // 2, self.g.head_dim - self.g.rope_dim))


class SharingAttention(Attention):
    """Attention over the cache of an earlier layer, in which the new tokens are already."""

    def forward(self, x: Tensor, shared: Shared, caches: LayerCaches | None = None) -> Tensor:
        assert caches is not None
        q = self.q_proj(x).reshape(1, self.g.heads, self.g.head_dim, -1)
        q = self.turn(self.q_norm(q), shared).transpose(2, 3)
        out: Tensor = self.o_proj(self.attended(q, caches["k"], caches["v"], shared))
        return out


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

    def forward(self, x: Tensor, shared: Shared, caches: LayerCaches | None = None) -> Tensor:
        assert caches is not None
        q, k, v = self.convolved(x, shared, caches)  # each [1, heads, head_dim, T]
        q, k = self.turn(q, shared).transpose(2, 3), self.turn(k, shared).transpose(2, 3)
        out: Tensor = self.o_proj(self.mixed(q, k, v.transpose(2, 3), shared, caches))
        return out

    def convolved(self, x: Tensor, shared: Shared, caches: LayerCaches) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of x [1, d, T, 1]; the ring is [1, 1, channels, R]."""
        g, width = self.g, self.width
        q, k = self.q_proj(x), self.k_proj(x)
        now = torch.cat([q, k], dim=1)
        columns = torch.cat([now, self.v_proj_delayed(x)], dim=1)
        added = columns.reshape(1, 1, width + self.delayed, -1)
        ring = caches.put("c", added, shared.ring_write, shared.ring_keep)
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
