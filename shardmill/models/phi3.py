"""model_type phi3: Phi-3, Phi-3.5 and Phi-4-mini.

Grouped-query attention with fused qkv, gated MLP with fused gate and up, RMSNorm, partial rotary, LongRoPE.
Source of the arithmetic: transformers, models/phi3/modeling_phi3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from shardmill.errors import CheckpointError
from shardmill.models.architecture import Architecture, Graph, Names, Rope, first_line
from shardmill.models.primitives import GatedMLP, RMSNorm, attend, projection, rotate, scale, write_cache

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def architecture(config: Any, context: int) -> Architecture:
    """The numbers of a transformers Phi3Config, for programs of `context` key/value slots.

    Raises CheckpointError for what the graph contract has no place for.
    """
    if config.hidden_act != "silu":
        raise CheckpointError(f"hidden_act {config.hidden_act!r}: phi3 programs have silu only")
    if (config.sliding_window or context) < context:
        raise CheckpointError(f"context {context} is over the model's sliding window {config.sliding_window}")
    if context > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise CheckpointError(f"context {context} is over the model's {limit} positions; lower context in the config")
    frequencies = checked_rope(config, context)
    graph = Graph(
        model_type=config.model_type,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rope_dim=2 * len(frequencies.inv_freq),
        ffn=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
    )
    if graph.rope_dim > graph.head_dim:
        raise CheckpointError(f"rope_parameters: turn {graph.rope_dim} dimensions of heads that have {graph.head_dim}")
    if graph.heads % graph.kv_heads:
        raise CheckpointError(f"{graph.heads} heads are no multiple of {graph.kv_heads} key/value heads")
    return Architecture(
        graph=graph,
        layers=config.num_hidden_layers,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        max_positions=config.max_position_embeddings,
        rope=frequencies,
    )


def checked_rope(config: Any, context: int) -> Rope:
    """`rope`, or CheckpointError for parameters of which transformers makes no table of numbers."""
    try:
        found = rope(config, context)
        if not all(isfinite(number) for number in (*found.inv_freq, found.scale)):
            raise ValueError("some frequencies are not finite")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"rope_parameters: no rotary table can be made of them: {first_line(error)}") from error
    return found


def rope(config: Any, context: int) -> Rope:
    """Frequencies and attention factor as transformers computes them for a whole sequence of `context` tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        inv_freq, scale = Phi3RotaryEmbedding.compute_default_rope_parameters(config)
        return Rope(tuple(inv_freq.tolist()), float(scale), "default")
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, seq_len=context)
    long = context > config.rope_parameters["original_max_position_embeddings"]
    return Rope(tuple(inv_freq.tolist()), float(scale), "long" if long else "short")


def tensor_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of the checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (a.vocab, a.graph.hidden), FINAL_NORM: (a.graph.hidden,)}
    for i in range(a.layers):
        shapes.update(layer_tensor_shapes(a.graph, i))
    if not a.tied:
        shapes[LM_HEAD] = (a.vocab, a.graph.hidden)
    return shapes


def layer_tensor_shapes(g: Graph, index: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's tensors."""
    p = f"model.layers.{index}."
    return {
        p + "input_layernorm.weight": (g.hidden,),
        p + "self_attn.qkv_proj.weight": ((g.heads + 2 * g.kv_heads) * g.head_dim, g.hidden),
        p + "self_attn.o_proj.weight": (g.hidden, g.heads * g.head_dim),
        p + "post_attention_layernorm.weight": (g.hidden,),
        p + "mlp.gate_up_proj.weight": (2 * g.ffn, g.hidden),
        p + "mlp.down_proj.weight": (g.hidden, g.ffn),
    }


def names(a: Architecture) -> Names:
    """What the checkpoint calls the tensors that parts are made of."""
    layers = tuple(tuple(layer_tensor_shapes(a.graph, i)) for i in range(a.layers))
    return Names(layers, FINAL_NORM, EMBEDDING if a.tied else LM_HEAD, EMBEDDING)


class Attention(nn.Module):
    """Causal attention over the cache, with the new tokens written into it first."""

    def __init__(self, g: Graph, qkv: Tensor, out: Tensor) -> None:
        super().__init__()
        self.g = g
        self.qkv_proj, self.o_proj = projection(qkv), projection(out)

    def forward(self, x: Tensor, shared: Shared, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        g = self.g
        turning = g.heads + g.kv_heads  # heads that rotate
        qk, v = torch.split(self.qkv_proj(x), [turning * g.head_dim, g.kv_heads * g.head_dim], dim=1)
        qk = qk.reshape(1, turning, g.head_dim, -1)
        qk = rotate(qk, shared.cos, shared.sin, (g.rope_dim // 2, g.head_dim - g.rope_dim))
        q, k = torch.split(qk.transpose(2, 3), [g.heads, g.kv_heads], dim=1)  # [1, heads, T, head_dim]
        v = v.reshape(1, g.kv_heads, g.head_dim, -1).transpose(2, 3)
        k_cache[:] = write_cache(k_cache, k, shared.write_mask, shared.keep)
        v_cache[:] = write_cache(v_cache, v, shared.write_mask, shared.keep)
        # Head h = kv * group + g: the query heads of one key/value head are neighbours, so (g, t) is one axis.
        q = scale(q, g.head_dim**-0.5).reshape(1, g.kv_heads, -1, g.head_dim)  # [1, kv_heads, group * T, head_dim]
        y = attend(q, k_cache, v_cache, shared.mask)
        y = y.reshape(1, g.heads, -1, g.head_dim).transpose(2, 3)  # [1, heads, head_dim, T]
        out: Tensor = self.o_proj(y.reshape(1, g.heads * g.head_dim, -1, 1))
        return out


class Shared:
    """What every layer of a part needs of the inputs, computed once per part."""

    def __init__(self, cos: Tensor, sin: Tensor, mask: Tensor, write_mask: Tensor, group: int) -> None:
        self.cos, self.sin = cos.transpose(0, 1), sin.transpose(0, 1)  # [rope_dim / 2, T]
        self.mask = torch.cat([mask] * group, dim=2)  # [1, 1, group * T, S]
        self.write_mask = write_mask  # [1, 1, S, T]
        self.keep = 1 - write_mask.sum(dim=3, keepdim=True)  # [1, 1, S, 1]


class Layer(nn.Module):
    """One decoder layer; submodules carry the checkpoint's names, so that the program's weights do too."""

    def __init__(self, g: Graph, index: int, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        p = f"model.layers.{index}."
        self.input_layernorm = RMSNorm(weights[p + "input_layernorm.weight"], g.rms_norm_eps)
        self.self_attn = Attention(g, weights[p + "self_attn.qkv_proj.weight"], weights[p + "self_attn.o_proj.weight"])
        self.post_attention_layernorm = RMSNorm(weights[p + "post_attention_layernorm.weight"], g.rms_norm_eps)
        self.mlp = GatedMLP(weights[p + "mlp.gate_up_proj.weight"], weights[p + "mlp.down_proj.weight"])

    def forward(self, x: Tensor, shared: Shared, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), shared, k_cache, v_cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class LayersPart(nn.Module):
    """Layers [start, end) with their caches as buffers: the graph contract's layers part."""

    def __init__(self, g: Graph, start: int, end: int, slots: int, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.g, self.indices = g, range(start, end)
        self.layers = nn.ModuleDict({str(i): Layer(g, i, weights) for i in self.indices})
        for i in self.indices:
            for name in (f"k_{i}", f"v_{i}"):
                self.register_buffer(name, torch.zeros(1, g.kv_heads, slots, g.head_dim))

    def forward(
        self, x: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor, kv_write_mask: Tensor
    ) -> Tensor:
        shared = Shared(rope_cos, rope_sin, attn_mask, kv_write_mask, self.g.group)
        for i in self.indices:
            x = self.layers[str(i)](x, shared, getattr(self, f"k_{i}"), getattr(self, f"v_{i}"))
        return x


class HeadPart(nn.Module):
    """Final norm and one slice of the vocabulary: hidden [1, d, T, 1] -> logits [1, V_j, T, 1]."""

    def __init__(self, g: Graph, norm: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.norm, self.lm_head = RMSNorm(norm, g.rms_norm_eps), projection(rows)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits
