"""model_type ministral3: Mistral AI's Ministral 3. Llama with YaRN.

Beyond the original length, queries also grow with their position. Programs lack this factor, so such a context is
refused; up to the original length the factor is 1.
Source of the arithmetic: transformers, models/ministral3/modeling_ministral3.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import decoder, sliding_kind


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Ministral3Config for programs of `context` slots."""
    window, original = config.sliding_window, config.rope_parameters.get("original_max_position_embeddings")
    if config.rope_parameters.get("llama_4_scaling_beta") and context > original:
        raise CheckpointError(
            f"context {context} is over the original length {original}: there llama_4_scaling_beta lets queries grow "
            "with their position, which programs lack; lower context in the config"
        )
    kinds = (sliding_kind(context, window),) * config.num_hidden_layers
    return decoder(config, context, honours=("sliding_window",), kinds=kinds, window=window)
