"""model_type olmo2: OLMo 2. Norms on the branches' outputs only, and over all heads of query and key together.

Source of the arithmetic: transformers, models/olmo2/modeling_olmo2.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import decoder


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Olmo2Config for programs of `context` slots."""
    bias = bool(config.attention_bias)
    return decoder(
        config,
        context,
        honours=("attention_bias",),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="wide",
        pre_norms=False,
        post_norms=True,
    )
