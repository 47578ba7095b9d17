"""model_type qwen3: Qwen3, dense. A norm on each head of query and key before the rotation.

Source of the arithmetic: transformers, models/qwen3/modeling_qwen3.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import attention_biases, decoder, kinds_by_type
from shardmill.models.families.qwen2 import WINDOWS


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Qwen3Config for programs of `context` slots."""
    window = config.sliding_window
    return decoder(
        config,
        context,
        honours=(*WINDOWS, "attention_bias"),
        kinds=kinds_by_type(config.layer_types, context, window),
        window=window,
        **attention_biases(config),
        qk_norm="before",
    )
