"""model_type lfm2: Liquid's LFM2, dense. Short convolutions, and attention on some layers.

Source of the arithmetic: transformers, models/lfm2/modeling_lfm2.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import LayerSpec, ModelDescription, TensorSource
from shardmill.models.decoder import decoder

HONOURED = (
    "block_auto_adjust_ff_dim",
    "block_ff_dim",
    "block_ffn_dim_multiplier",
    "block_multiple_of",
    "conv_L_cache",
    "full_attn_idxs",  # transformers derives layer_types from it
    "layer_types",
    "norm_eps",
)
# Further fields of configs on the hub. transformers reads only `full_attn_idxs`, to derive `layer_types`.
UNREAD = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "full_attn_idxs",
    "num_heads",
    "theta",
    "use_pos_enc",
)
RENAMED = {
    "input_layernorm.weight": "operator_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.o_proj.weight": "self_attn.out_proj.weight",
    "self_attn.q_norm.weight": "self_attn.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attn.k_layernorm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
}


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Lfm2Config for programs of `context` slots."""
    taps = convolution_taps(config)
    return decoder(
        config,
        context,
        honours=(*HONOURED, *UNREAD),
        kinds=layer_kinds(config.layer_types, dense=config.num_hidden_layers),
        tensors={role: TensorSource(name) for role, name in RENAMED.items()} | taps,
        final_norm="embedding_norm.weight",
        ffn=_feed_forward_width(config),
        rms_norm_eps=config.norm_eps,
        activation="silu",
        qk_norm="before",
        conv_taps=config.conv_L_cache,
    )


def layer_kinds(types: Sequence[str] | None, dense: int) -> tuple[LayerSpec, ...]:
    """Return convolutions and attention after the config's `layer_types`; the first `dense` layers have no experts.

    Raises:
        CheckpointError: if `layer_types` is missing. For models with experts, transformers has no default for it.
    """
    if types is None:
        raise CheckpointError("layer_types: missing in config.json, which must name each layer's kind")
    mixers = (LayerSpec(mixer="conv", rope=None, mask="") if name == "conv" else LayerSpec() for name in types)
    return tuple(replace(kind, ffn="mlp" if i < dense else "experts") for i, kind in enumerate(mixers))


def convolution_taps(config: Any) -> dict[str, TensorSource]:
    """Return where the taps of the short convolutions lie. Raises CheckpointError for biases."""
    if config.conv_bias:
        raise CheckpointError("conv_bias is true: programs have short convolutions without biases only")
    shape = (config.hidden_size, 1, config.conv_L_cache)
    return {
        f"conv.tap_{j}": TensorSource("conv.conv.weight", column=j, shape=shape) for j in range(config.conv_L_cache)
    }


def _feed_forward_width(config: Any) -> int:
    """Return the MLP's width, as transformers computes it from the config."""
    width = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return width
    width = int(2 * width / 3)
    if config.block_ffn_dim_multiplier is not None:
        width = int(config.block_ffn_dim_multiplier * width)
    multiple = int(config.block_multiple_of)
    return multiple * -(-width // multiple)
