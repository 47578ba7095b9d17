"""model_type exaone4: LG's EXAONE 4. Norms on the branches' outputs only; beside sliding layers, full ones don't turn.

Source of the arithmetic: transformers, models/exaone4/modeling_exaone4.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ROPE, ModelDescription
from shardmill.models.decoder import decoder, kinds_by_type


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Exaone4Config for programs of `context` slots."""
    window = config.sliding_window
    full_rope = ROPE if window is None else None
    return decoder(
        config,
        context,
        honours=("layer_types", "sliding_window", "sliding_window_pattern"),
        kinds=kinds_by_type(config.layer_types, context, window, full_rope=full_rope),
        window=window,
        qk_norm="before",
        pre_norms=False,
        post_norms=True,
    )
