"""model_type recurrent_gemma: Google's RecurrentGemma (Griffin). RG-LRU and attention within a window, in turn.

Source of the arithmetic: transformers, models/recurrent_gemma/modeling_recurrent_gemma.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import frexp, ldexp, sqrt
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import LayerSpec, ModelDescription, Sources, TensorSource
from shardmill.models.contract import DECAY_SCALE
from shardmill.models.decoder import activation, decoder, sliding_kind
from shardmill.models.recurrences import MOST_TAPS, RgLru

HONOURED = (
    "attention_bias",
    "attention_window_size",
    "block_types",
    "conv1d_width",
    "final_w_init_variance_scale",
    "hidden_activation",
    "logits_soft_cap",
    "lru_width",
    "partial_rotary_factor",
    "w_init_variance_scale",
)
RATE = -8.0  # of every RG-LRU, times the softplus of a channel's number


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers RecurrentGemmaConfig for programs of `context` slots."""
    window = config.attention_window_size
    kinds = {
        "recurrent": LayerSpec(mixer="rg_lru", rope=None, mask=""),
        "attention": sliding_kind(context, window),
    }
    if unknown := sorted({*config.block_types} - kinds.keys()):
        raise CheckpointError(f"block_types: {unknown[0]!r}: programs have {' and '.join(kinds)} only")
    blocks = [config.block_types[i % len(config.block_types)] for i in range(config.num_hidden_layers)]
    return decoder(
        config,
        context,
        honours=HONOURED,
        kinds=tuple(kinds[name] for name in blocks),
        window=window,
        embedding_scale=_in_bf16(sqrt(config.hidden_size)),
        tensors=_tensors(config),
        final_norm="final_norm.weight",
        ffn=config.intermediate_size // 2,
        activation=activation(config, "hidden_activation"),
        qkv_bias=bool(config.attention_bias),
        o_bias=True,
        mlp_bias=True,
        logit_cap=config.logits_soft_cap,
        rg_lru=_sizes(config) if "recurrent" in blocks else None,
    )


def _in_bf16(value: float) -> float:
    """Return a number as bf16 holds it: transformers' factor of the embedding is of this type in any model."""
    mantissa, exponent = frexp(value)
    return ldexp(round(mantissa * 2**8), exponent - 8)


def _sizes(config: Any) -> RgLru:
    """Return the sizes of the RG-LRU layers. Raises CheckpointError for sizes that programs do not support."""
    heads, width = config.num_attention_heads, config.lru_width
    if width < 1 or width % heads:
        raise CheckpointError(f"lru_width is {width}: it must be a multiple of the {heads} heads")
    if not 1 < config.conv1d_width <= MOST_TAPS:
        raise CheckpointError(f"conv1d_width is {config.conv1d_width}: programs have 2 to {MOST_TAPS} taps")
    return RgLru(heads=heads, head_dim=width // heads, taps=config.conv1d_width)


def _tensors(config: Any) -> dict[str, Sources]:
    """Return the tensors of constants that the checkpoint names or writes otherwise, by role."""
    heads, width, taps = config.num_attention_heads, config.lru_width, config.conv1d_width
    block, unit = "temporal_block.", "temporal_block.rg_lru."
    sources: dict[str, Sources] = {  # gains are 1 + weight
        "input_layernorm.weight": TensorSource("temporal_pre_norm.weight", add=1.0),
        "post_attention_layernorm.weight": TensorSource("channel_pre_norm.weight", add=1.0),
        "norm.weight": TensorSource("final_norm.weight", add=1.0),
        f"{block}conv_bias": TensorSource(f"{block}conv_1d.bias"),
        f"{block}rate": TensorSource(f"{unit}recurrent_param", softplus=True, times=RATE * DECAY_SCALE),
    }
    for role in ("gate_proj", "up_proj", "down_proj"):
        sources |= {f"mlp.{role}.{name}": TensorSource(f"mlp_block.{role}.{name}") for name in ("weight", "bias")}
    for role in ("q_proj", "k_proj", "v_proj", "o_proj"):
        sources |= {f"self_attn.{role}.{name}": TensorSource(f"{block}{role}.{name}") for name in ("weight", "bias")}
    for j in range(taps):
        sources[f"{block}tap_{j}"] = TensorSource(f"{block}conv_1d.weight", column=j, shape=(width, 1, taps))
    for name in ("input_gate", "recurrent_gate"):
        stack = TensorSource(f"{unit}{name}_weight", shape=(heads, width // heads, width // heads))
        sources[f"{block}{name}"] = tuple(replace(stack, index=head) for head in range(heads))
        sources[f"{block}{name}_bias"] = TensorSource(f"{unit}{name}_bias", shape=(heads, width // heads))
    return sources
