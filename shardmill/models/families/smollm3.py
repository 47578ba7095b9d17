"""model_type smollm3: SmolLM3. Some layers have no rotary embedding: those where `no_rope_layers` is 0.

Source of the arithmetic: transformers, models/smollm3/modeling_smollm3.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ROPE, ModelDescription
from shardmill.models.decoder import attention_biases, decoder, sliding_kind
from shardmill.models.families.qwen2 import WINDOWS

HONOURED = (*WINDOWS, "attention_bias", "mlp_bias", "no_rope_layer_interval", "no_rope_layers")


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers SmolLM3Config for programs of `context` slots."""
    window = config.sliding_window
    kinds = tuple(
        sliding_kind(context, window if kind == "sliding_attention" else None, rope=ROPE if turns else None)
        for kind, turns in zip(config.layer_types, config.no_rope_layers, strict=True)
    )
    return decoder(
        config,
        context,
        honours=HONOURED,
        kinds=kinds,
        window=window,
        **attention_biases(config),
        mlp_bias=bool(config.mlp_bias),
    )
