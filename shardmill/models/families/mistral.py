"""model_type mistral: Mistral 7B and what was fine-tuned from it. Where it has a window, all layers slide.

Source of the arithmetic: transformers, models/mistral/modeling_mistral.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import decoder, sliding_kind


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers MistralConfig for programs of `context` slots."""
    window = config.sliding_window
    kinds = (sliding_kind(context, window),) * config.num_hidden_layers
    return decoder(config, context, honours=("sliding_window",), kinds=kinds, window=window)
