"""The programs of a model as PyTorch modules, built from a Graph and the kinds of its layers.

Submodules carry the paths that models/contract.py gives the weights, so that the programs' constants do too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardmill.models.architecture import Graph, Kind
from shardmill.models.contract import Form, inputs, rope_inputs, states
from shardmill.models.primitives import (
    ACTIVATIONS,
    LayerNorm,
    RMSNorm,
    attend,
    cap,
    projection,
    read_ring,
    rotate,
    scale,
    write_cache,
    write_ring,
)

Weights = Mapping[str, Tensor]


class Shared:
    """What the layers of a part need of its inputs, computed once per part."""

    def __init__(self, form: Form, given: Mapping[str, Tensor]) -> None:
        self.ropes: dict[str, tuple[Tensor, Tensor]] = {}
        for table in form.ropes:
            cos, sin = (given[name] for name in rope_inputs(table))
            self.ropes[table] = cos.transpose(0, 1), sin.transpose(0, 1)  # each [rope_dim / 2, T]
        group = form.graph.group
        self.masks: dict[str, Tensor] = {}
        for name in form.masks:
            mask = torch.cat([given[name]] * group, dim=2)  # [1, 1, group * T, S]
            if len(form.masks) > 1:
                # torch.jit names a value where it is used first: here, or else the kind of the first layer would
                # decide which of the masks is called what. Nothing uses the sum, so no program has it.
                _ = mask + 0
            self.masks[name] = mask
        # By the attention mask: where its layers write, [1, 1, S, T], and what of the cache they keep, [1, 1, S, 1].
        kept = form.masks if form.kind == "layers" else ()
        written = {name: given[name] for name in sorted({form.write_mask(mask) for mask in kept})}
        left = {name: 1 - mask.sum(dim=3, keepdim=True) for name, mask in written.items()}
        self.writes = {mask: (written[name], left[name]) for mask in kept for name in [form.write_mask(mask)]}
        if form.convolves:
            self.ring_write = given["conv_write_mask"]  # [1, 1, T, R]
            self.ring_keep = 1 - self.ring_write.sum(dim=2, keepdim=True)  # [1, 1, 1, R]
            self.ring_read = torch.split(given["conv_read_mask"], 1, dim=1)  # L - 1 of [1, 1, R, T]


class Attention(nn.Module):
    """Attention over the cache, with the new tokens written into it first; without one, over the tokens of the pass."""

    qkv_proj: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def __init__(self, g: Graph, kind: Kind, weights: Weights, path: str) -> None:
        super().__init__()
        self.g, self.kind = g, kind
        for name in ("qkv_proj",) if g.fused else ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, projection(weights[f"{path}{name}.weight"], weights.get(f"{path}{name}.bias")))
        if g.qk_norm:
            axis = 1 if g.qk_norm == "wide" else 2
            self.q_norm = RMSNorm(weights[f"{path}q_norm.weight"], g.rms_norm_eps, axis)
            self.k_norm = RMSNorm(weights[f"{path}k_norm.weight"], g.rms_norm_eps, axis)
        self.o_proj = projection(weights[f"{path}o_proj.weight"], weights.get(f"{path}o_proj.bias"))

    def forward(self, x: Tensor, shared: Shared, *cache: Tensor) -> Tensor:
        g = self.g
        q, k, v = self.fused(x, shared) if g.fused else self.separate(x, shared)  # each [1, heads, T, head_dim]
        if cache:
            k_cache, v_cache = cache
            k_cache[:] = write_cache(k_cache, k, *shared.writes[self.kind.mask])
            v_cache[:] = write_cache(v_cache, v, *shared.writes[self.kind.mask])
            k, v = cache
        # Head h = kv * group + g: the query heads of one key/value head are neighbours, so (g, t) is one axis.
        factor = g.attention_scale or g.head_dim**-0.5
        q = scale(q, factor).reshape(1, g.kv_heads, -1, g.head_dim)  # [1, kv_heads, group * T, head_dim]
        y = attend(q, k, v, shared.masks[self.kind.mask], g.score_cap)
        y = y.reshape(1, g.heads, -1, g.head_dim).transpose(2, 3)  # [1, heads, head_dim, T]
        out: Tensor = self.o_proj(y.reshape(1, g.heads * g.head_dim, -1, 1))
        return out

    def fused(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of one projection; the heads of query and key are rotated together."""
        g = self.g
        turning = g.heads + g.kv_heads  # heads that rotate
        qk, v = torch.split(self.qkv_proj(x), [turning * g.head_dim, g.kv_heads * g.head_dim], dim=1)
        qk = qk.reshape(1, turning, g.head_dim, -1)
        qk = self.turn(qk, shared)
        q, k = torch.split(qk.transpose(2, 3), [g.heads, g.kv_heads], dim=1)
        v = v.reshape(1, g.kv_heads, g.head_dim, -1).transpose(2, 3)
        return q, k, v

    def separate(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of a projection each, with the norms that the family has."""
        g = self.g
        q, k = self.q_proj(x), self.k_proj(x)  # [1, heads * head_dim, T, 1]
        if g.qk_norm == "wide":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.reshape(1, g.heads, g.head_dim, -1), k.reshape(1, g.kv_heads, g.head_dim, -1)
        if g.qk_norm == "before":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.turn(q, shared), self.turn(k, shared)
        if g.qk_norm == "after":
            q, k = self.q_norm(q), self.k_norm(k)
        v = self.v_proj(x).reshape(1, g.kv_heads, g.head_dim, -1)
        return q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)

    def turn(self, x: Tensor, shared: Shared) -> Tensor:
        """Rotary embedding of heads [1, heads, head_dim, T], where the layer has one."""
        if self.kind.rope is None:
            return x
        cos, sin = shared.ropes[self.kind.rope]
        return rotate(x, cos, sin, (self.g.rope_dim // 2, self.g.head_dim - self.g.rope_dim))


class ShortConv(nn.Module):
    """A gated causal convolution of a few taps over a ring of its own inputs (transformers, models/lfm2)."""

    def __init__(self, g: Graph, weights: Weights, path: str) -> None:
        super().__init__()
        self.hidden, self.taps = g.hidden, g.conv_taps
        self.in_proj = projection(weights[f"{path}in_proj.weight"])
        self.out_proj = projection(weights[f"{path}out_proj.weight"])
        for j in range(self.taps):
            tap = weights[f"{path}tap_{j}"].reshape(1, -1, 1, 1)
            setattr(self, f"tap_{j}", nn.Parameter(tap, requires_grad=False))

    def forward(self, x: Tensor, shared: Shared, ring: Tensor) -> Tensor:
        b, c, x = torch.split(self.in_proj(x), self.hidden, dim=1)  # each [1, d, T, 1]
        u = b * x
        ring[:] = write_ring(ring, u.reshape(1, 1, self.hidden, -1), shared.ring_write, shared.ring_keep)
        # The last tap is this token's; tap L - 1 - j reads j tokens back.
        y = getattr(self, f"tap_{self.taps - 1}") * u
        for j, read in enumerate(shared.ring_read, start=1):
            y = y + getattr(self, f"tap_{self.taps - 1 - j}") * read_ring(ring, read, self.hidden)
        out: Tensor = self.out_proj(c * y)
        return out


class GatedMLP(nn.Module):
    """down(activation(gate) * up), gate and up in one projection or in two."""

    gate_up_proj: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module

    def __init__(self, g: Graph, weights: Weights, path: str) -> None:
        super().__init__()
        self.g = g
        for name in ("gate_up_proj",) if g.fused else ("gate_proj", "up_proj"):
            setattr(self, name, projection(weights[f"{path}{name}.weight"], weights.get(f"{path}{name}.bias")))
        self.down_proj = projection(weights[f"{path}down_proj.weight"], weights.get(f"{path}down_proj.bias"))

    def forward(self, x: Tensor) -> Tensor:
        if self.g.fused:
            gate, up = torch.split(self.gate_up_proj(x), self.g.ffn, dim=1)  # each [1, ffn, T, 1]
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        down: Tensor = self.down_proj(ACTIVATIONS[self.g.activation](gate) * up)
        return down


class PlainMLP(nn.Module):
    """down(activation(up))."""

    def __init__(self, g: Graph, weights: Weights, path: str) -> None:
        super().__init__()
        self.activation = g.activation
        self.up_proj = projection(weights[f"{path}up_proj.weight"], weights.get(f"{path}up_proj.bias"))
        self.down_proj = projection(weights[f"{path}down_proj.weight"], weights.get(f"{path}down_proj.bias"))

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))
        return down


def norm(g: Graph, weights: Weights, path: str, eps: float) -> RMSNorm:
    """The norm of a path, of the graph's kind."""
    if g.norm == "rms":
        return RMSNorm(weights[f"{path}.weight"], eps)
    return LayerNorm(weights[f"{path}.weight"], weights.get(f"{path}.bias"), eps)


class Layer(nn.Module):
    """A mixer and an MLP, each a branch of the residual stream, with the norms that the family has."""

    def __init__(self, g: Graph, kind: Kind, index: int, weights: Weights) -> None:
        super().__init__()
        path = f"layers.{index}."
        self.g, self.mixes = g, kind.mixer == "attention"
        self.input_layernorm: nn.Module = nn.Identity()
        if g.pre_norms and kind.normed and not g.outer_norms:
            self.input_layernorm = norm(g, weights, path + "input_layernorm", g.stream_eps)
        if self.mixes:
            self.self_attn = Attention(g, kind, weights, path + "self_attn.")
        else:
            self.conv = ShortConv(g, weights, path + "conv.")
        second = g.rms_norm_eps if g.post_norms else g.stream_eps
        self.post_attention_layernorm = norm(g, weights, path + "post_attention_layernorm", second)
        self.mlp = (GatedMLP if g.gated else PlainMLP)(g, weights, path + "mlp.")
        if g.post_norms and g.pre_norms:
            self.pre_feedforward_layernorm = norm(g, weights, path + "pre_feedforward_layernorm", g.stream_eps)
        if g.post_norms or g.outer_norms:
            last = g.rms_norm_eps if g.post_norms else g.stream_eps
            self.post_feedforward_layernorm = norm(g, weights, path + "post_feedforward_layernorm", last)

    def forward(self, x: Tensor, shared: Shared, *states: Tensor) -> Tensor:
        mixer = self.self_attn if self.mixes else self.conv
        if self.g.outer_norms:
            x = self.post_attention_layernorm(x + mixer(x, shared, *states))
            return self.post_feedforward_layernorm(x + self.mlp(x))  # type: ignore[no-any-return]
        if self.g.post_norms:
            return self.between(x, mixer, shared, states)
        x = x + scale(mixer(self.input_layernorm(x), shared, *states), self.g.branch_scale)
        x = x + scale(self.mlp(self.post_attention_layernorm(x)), self.g.branch_scale)
        return x

    def between(self, x: Tensor, mixer: nn.Module, shared: Shared, states: tuple[Tensor, ...]) -> Tensor:
        """The layer with norms on its branches' outputs, and before them where the family has those too."""
        y = self.input_layernorm(x) if self.g.pre_norms else x
        x = x + self.post_attention_layernorm(mixer(y, shared, *states))
        y = self.pre_feedforward_layernorm(x) if self.g.pre_norms else x
        x = x + self.post_feedforward_layernorm(self.mlp(y))
        return x


class LayersPart(nn.Module):
    """Consecutive layers with their states as buffers: the contract's part of kind "layers"."""

    def __init__(self, form: Form, weights: Weights) -> None:
        super().__init__()
        self.form, self.names = form, list(inputs(form))
        self.layers = nn.ModuleDict({str(i): Layer(form.graph, kind, i, weights) for i, kind in form.layers})
        for name, shape in states(form).items():
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        shared = Shared(self.form, dict(zip(self.names[1:], rest, strict=True)))
        for i, kind in self.form.layers:
            held = (f"c_{i}",) if kind.mixer == "conv" else (f"k_{i}", f"v_{i}")
            x = self.layers[str(i)](x, shared, *(getattr(self, name) for name in held))
        return x


class HeadPart(nn.Module):
    """Final norm and some rows of the vocabulary: hidden [1, d, T, 1] -> logits [1, rows, T, 1]."""

    def __init__(self, form: Form, weights: Weights) -> None:
        super().__init__()
        self.g = form.graph
        self.norm = RMSNorm(weights["norm.weight"], self.g.stream_eps)
        self.lm_head = projection(weights["lm_head.weight"])

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return cap(scale(logits, self.g.logit_scale), self.g.logit_cap)


class EncoderPart(nn.Module):
    """All layers with what comes before and after them: the contract's part of kind "encoder"."""

    embed_norm: nn.Module
    norm: nn.Module
    dense: nn.Module
    dense_norm: nn.Module
    classifier: nn.Module

    def __init__(self, form: Form, weights: Weights) -> None:
        super().__init__()
        assert form.ends is not None
        g, ends = form.graph, form.ends
        self.form, self.ends, self.names = form, ends, list(inputs(form))
        for name, there in (
            ("embed_norm", ends.embed_norm),
            ("norm", ends.final_norm),
            ("dense_norm", ends.dense_norm),
        ):
            setattr(self, name, norm(g, weights, name, g.rms_norm_eps) if there else nn.Identity())
        self.layers = nn.ModuleDict({str(i): Layer(g, kind, i, weights) for i, kind in form.layers})
        for name, is_there in (("dense", bool(ends.dense)), ("classifier", bool(ends.labels))):
            made = projection(weights[f"{name}.weight"], weights.get(f"{name}.bias")) if is_there else nn.Identity()
            setattr(self, name, made)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        shared = Shared(self.form, dict(zip(self.names[1:], rest, strict=True)))
        x = self.embed_norm(x)
        for layer in self.layers.values():
            x = layer(x, shared)
        x = self.dense(self.norm(x))
        if self.ends.dense:
            x = ACTIVATIONS[self.ends.dense](x)
        out: Tensor = self.classifier(self.dense_norm(x))
        return out


PARTS: Mapping[str, type[nn.Module]] = {"layers": LayersPart, "head": HeadPart, "encoder": EncoderPart}


def build(form: Form, weights: Weights) -> nn.Module:
    """The module of a part, in inference mode. Args: weights in fp32 by the contract's paths."""
    return PARTS[form.kind](form, weights).eval()
