"""model_type glm4: Z.ai's GLM-4-0414 and GLM-Z1. Norms around branches; neighbours turn, in half of each head.

Source of the arithmetic: transformers, models/glm4/modeling_glm4.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ROPE, ModelDescription, TensorSource
from shardmill.models.decoder import decoder, pairs_turned, row_halves
from shardmill.models.rotary import rope

NORMS = {
    "post_attention_layernorm.weight": TensorSource("post_self_attn_layernorm.weight"),
    "pre_feedforward_layernorm.weight": TensorSource("post_attention_layernorm.weight"),
    "post_feedforward_layernorm.weight": TensorSource("post_mlp_layernorm.weight"),
}


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Glm4Config for programs of `context` slots."""
    table, bias = rope(config, context), bool(config.attention_bias)
    gate_up = row_halves("mlp.gate_up_proj.weight", config.intermediate_size, config.hidden_size)
    return decoder(
        config,
        context,
        honours=("attention_bias", "partial_rotary_factor"),
        ropes={ROPE: table},
        tensors=pairs_turned(config, table.dim, bias) | gate_up | NORMS,
        qkv_bias=bias,
        post_norms=True,
    )
