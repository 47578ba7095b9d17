"""model_type qwen3: Qwen3, dense. A norm on each head of query and key before the rotation.

Source of the arithmetic: transformers, models/qwen3/modeling_qwen3.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import decoder, kinds_by_type
from shardmill.models.families.qwen2 import WINDOWS


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Qwen3Config for programs of `context` slots."""
    window, bias = config.sliding_window, bool(config.attention_bias)
    return decoder(
        config,
        context,
        honours=(*WINDOWS, "attention_bias"),
        kinds=kinds_by_type(config.layer_types, context, window),
        window=window,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="before",
    )
