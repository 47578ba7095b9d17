"""model_type stablelm: Stability AI's StableLM 2 and Zephyr. LayerNorm; a part of each head turns.

Source of the arithmetic: transformers, models/stablelm/modeling_stablelm.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import decoder


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers StableLmConfig for programs of `context` slots."""
    if config.qk_layernorm:
        raise CheckpointError("qk_layernorm is true: programs lack a LayerNorm for each head of query and key")
    return decoder(
        config,
        context,
        honours=("layer_norm_eps", "partial_rotary_factor", "use_parallel_residual", "use_qkv_bias", "qk_layernorm"),
        rms_norm_eps=config.layer_norm_eps,
        norm="layer",
        parallel=bool(config.use_parallel_residual),
        qkv_bias=bool(config.use_qkv_bias),
    )
