"""model_type phi3: Phi-3, Phi-3.5 and Phi-4-mini.

Fused qkv, fused gate and up, partial rotary, LongRoPE.
Source of the arithmetic: transformers, models/phi3/modeling_phi3.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import decoder, sliding_kind


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Phi3Config for programs of `context` slots."""
    window = config.sliding_window
    return decoder(
        config,
        context,
        honours=("sliding_window", "partial_rotary_factor"),
        kinds=(sliding_kind(context, window),) * config.num_hidden_layers,
        window=window,
        fused=True,
    )
