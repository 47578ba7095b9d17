"""Attention over the cache, or over the tokens of the pass: the inputs that layers share, and the blocks.

ZAYA's compressed convolutional attention (arXiv 2510.04476; transformers, models/zaya/modeling_zaya.py) is the same
attention after two short convolutions, which mix query and key over a few tokens. A residual of the projections is
added, and the sum is normed to the length of sqrt(head_dim). Half of the value comes from the token before. The values
of earlier tokens that the convolutions and the delayed half read lie in a ring of slots by position, like a short
convolution's input.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.contract import BLOCK, ORDER, RING, GraphSpec, rope_inputs
from shardmill.models.layer_constants import cca_widths, missing_projections
from shardmill.models.low_rank import LayerAdapter
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
    write_cache,
    write_ring,
)

Weights = Mapping[str, Tensor]


class Shared:
    """The inputs of a part as its layers need them, computed once per part."""

    def __init__(self, blueprint: GraphSpec, given: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> None:
        self.constants = constants  # that no checkpoint decides, by name
        self.order = constants.get(ORDER)  # of the experts, [1, classes, 1, 1]
        self.rows: list[Tensor] | None = [] if blueprint.hosted else None  # what the tokens add to the caches, in turn
        self.ropes: dict[str, tuple[Tensor, Tensor]] = {}
        for table in blueprint.ropes:
            cos, sin = (given[name] for name in rope_inputs(table))
            self.ropes[table] = cos.transpose(0, 1), sin.transpose(0, 1)  # each [rope_dim / 2, T]
        self.embedded = given.get("embedded")  # the tokens' embedding, [1, d, T, 1]
        self.row: Tensor | None = None  # the tokens' row for the present layer, [1, P, T, 1]
        self.adapter: LayerAdapter | None = None  # of the present layer
        self.cached: tuple[Tensor, ...] = ()  # keys and values that the present layer has read
        groups = {(kind.mask, blueprint.graph.of(kind).group) for _, kind in blueprint.layers if kind.attends}
        self.masks: dict[tuple[str, int], Tensor] = {}
        for name, group in sorted(groups):
            mask = torch.cat([given[name]] * group, dim=2)  # [1, 1, group * T, S]
            if len(groups) > 1:
                # torch.jit names a value where it is used first. Without this use, the kind of the first layer would
                # decide which mask gets which name. Nothing uses the sum, so no program has it.
                _ = mask + 0
            self.masks[name, group] = mask
        # By the attention mask: where its layers write, [1, 1, S, T], and what of the cache they keep, [1, 1, S, 1].
        cached = () if blueprint.kind == "encoder" else blueprint.written_masks
        written = {name: given[name] for name in sorted({blueprint.write_mask(mask) for mask in cached})}
        kept = {name: 1 - mask.sum(dim=3, keepdim=True) for name, mask in written.items()}
        self.writes = {mask: (written[name], kept[name]) for mask in cached for name in [blueprint.write_mask(mask)]}
        if blueprint.convolves or blueprint.recurs:
            self.ring_write = given["conv_write_mask"]  # [1, 1, T, R]
            self.ring_keep = 1 - self.ring_write.sum(dim=2, keepdim=True)  # [1, 1, 1, R]
        if blueprint.recurs and (sizes := blueprint.graph.recurrence):  # at the first token, and zeros at the others
            columns = 2 * (BLOCK + sizes.taps - 1)
            self.windows = given["recurrent_read_mask"].sum(dim=3, keepdim=True).reshape(1, 1, columns, RING)
            self.column = given["recurrent_out_mask"]  # [1, 1, T, B]
            self.blocks = blueprint.blocks
            firsts = range(BLOCK, BLOCK * blueprint.blocks, BLOCK)
            self.follows = [self.column[:, :, i : i + 1, 0:1] for i in firsts]  # for each block but the last
            self.goes_on = given["recurrent_keep_mask"].sum(dim=3, keepdim=True)  # [1, 1, 1, 1]
        if blueprint.convolves:
            self.ring_read = torch.split(given["conv_read_mask"], 1, dim=1)  # L - 1 of [1, 1, R, T]


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

    def forward(self, x: Tensor, shared: Shared, *cache: Tensor) -> Tensor:
        q, k, v = self.fused(x, shared) if self.g.fused else self.separate(x, shared)  # each [1, heads, T, head_dim]
        y = self.mixed(q, k, v, shared, *cache)
        y = y * sigmoid_by_tanh(self.gate_proj(x)) if self.g.output_gate else y
        y = scale(y, self.g.output_scale)
        out: Tensor = self.o_proj(y)
        return out + shared.adapter.attended(y) if shared.adapter else out

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared, *cache: Tensor) -> Tensor:
        """Return the heads' output over the cache, [1, heads * head_dim, T, 1], after the new tokens are written."""
        if cache and shared.rows is not None:
            shared.rows += [k, v]
            k, v = (
                write_cache(old, new, *shared.writes[self.kind.mask]) for old, new in zip(cache, (k, v), strict=True)
            )
        elif cache:
            k_cache, v_cache = cache
            k_cache[:] = write_cache(k_cache, k, *shared.writes[self.kind.mask])
            v_cache[:] = write_cache(v_cache, v, *shared.writes[self.kind.mask])
            k, v = cache
        shared.cached = k, v
        return self.attended(q, k, v, shared)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
        """Return the heads' output over keys and values, [1, heads * head_dim, T, 1]."""
        g = self.g
        # Head h = kv * group + g: the query heads of one key/value head are neighbours, so (g, t) is one axis.
        factor = g.attention_scale or g.head_dim**-0.5
        q = scale(q, factor).reshape(1, g.kv_heads, -1, g.head_dim)  # [1, kv_heads, group * T, head_dim]
        y = attend(q, k, v, shared.masks[self.kind.mask, g.group], g.score_cap, self.sinks)
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

    def forward(self, x: Tensor, shared: Shared, *cache: Tensor) -> Tensor:
        q = self.q_proj(x).reshape(1, self.g.heads, self.g.head_dim, -1)
        q, (k, v) = self.turn(self.q_norm(q), shared).transpose(2, 3), cache
        out: Tensor = self.o_proj(self.attended(q, k, v, shared))
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
