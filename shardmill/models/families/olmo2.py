"""model_type olmo2: OLMo 2. Norms on the branches' outputs only, and over all heads of query and key together.

Source of the arithmetic: transformers, models/olmo2/modeling_olmo2.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import attention_biases, decoder


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Olmo2Config for programs of `context` slots."""
    return decoder(
        config,
        context,
        honours=("attention_bias",),
        **attention_biases(config),
        qk_norm="wide",
        pre_norms=False,
        post_norms=True,
    )
