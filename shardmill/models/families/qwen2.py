"""model_type qwen2: Qwen2, Qwen2.5, Qwen2.5-Coder. Biases on query, key and value.

Source of the arithmetic: transformers, models/qwen2/modeling_qwen2.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import decoder, kinds_by_type

WINDOWS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Qwen2Config for programs of `context` slots."""
    window = config.sliding_window
    kinds = kinds_by_type(config.layer_types, context, window)
    return decoder(config, context, honours=WINDOWS, kinds=kinds, window=window, qkv_bias=True)
