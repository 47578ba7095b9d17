"""model_type seed_oss: ByteDance's Seed-OSS. Llama with biases on query, key and value that the output may lack.

Source of the arithmetic: transformers, models/seed_oss/modeling_seed_oss.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import decoder


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers SeedOssConfig for programs of `context` slots."""
    return decoder(
        config,
        context,
        honours=("attention_bias", "attention_out_bias", "mlp_bias"),
        qkv_bias=bool(config.attention_bias),
        o_bias=bool(config.attention_out_bias),
        mlp_bias=bool(config.mlp_bias),
    )
