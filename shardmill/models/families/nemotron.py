"""model_type nemotron: NVIDIA's Minitron and Nemotron-Mini, dense. LayerNorm with a gain of 1 + weight; squared ReLU.

Source of the arithmetic: transformers, models/nemotron/modeling_nemotron.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription, TensorSource
from shardmill.models.decoder import attention_biases, decoder

GAINS = ("input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight")


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers NemotronConfig for programs of `context` slots."""
    return decoder(
        config,
        context,
        honours=("attention_bias", "mlp_bias", "norm_eps", "partial_rotary_factor"),
        tensors={name: TensorSource(name, add=1.0) for name in GAINS},
        rms_norm_eps=config.norm_eps,
        norm="layer",
        gated=False,
        **attention_biases(config),
        mlp_bias=bool(config.mlp_bias),
    )
