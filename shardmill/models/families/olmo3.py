"""model_type olmo3: Ai2's OLMo 3. OLMo 2 with sliding layers, and a rotary table for each type of layer.

Source of the arithmetic: transformers, models/olmo3/modeling_olmo3.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import LOCAL_ROPE, ROPE, ModelDescription
from shardmill.models.decoder import attention_biases, decoder, kinds_by_type
from shardmill.models.rotary import rope


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Olmo3Config for programs of `context` slots."""
    window, types = config.sliding_window, {ROPE: "full_attention", LOCAL_ROPE: "sliding_attention"}
    return decoder(
        config,
        context,
        honours=("attention_bias", "layer_types", "sliding_window"),
        kinds=kinds_by_type(config.layer_types, context, window, sliding_rope=LOCAL_ROPE),
        ropes={name: rope(config, context, kind) for name, kind in types.items() if kind in config.layer_types},
        window=window,
        **attention_biases(config),
        qk_norm="wide",
        pre_norms=False,
        post_norms=True,
    )
