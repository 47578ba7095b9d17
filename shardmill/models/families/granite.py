"""model_type granite: IBM Granite 3, dense. Llama with four multipliers.

Source of the arithmetic: transformers, models/granite/modeling_granite.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import attention_biases, decoder

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers GraniteConfig for programs of `context` slots."""
    honours = ("attention_bias", "mlp_bias", *MULTIPLIERS)
    return decoder(config, context, honours=honours, mlp_bias=bool(config.mlp_bias), **granite_options(config))


def granite_options(config: Any) -> dict[str, Any]:
    """Return what Granite has with and without experts, for `decoder`."""
    return {
        "embedding_scale": config.embedding_multiplier,
        "attention_scale": config.attention_multiplier,
        "branch_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logits_scaling,
        **attention_biases(config),
    }
