"""model_type helium: Kyutai's Helium. Llama whose rotation turns neighbours; the attention's output has no bias.

Source of the arithmetic: transformers, models/helium/modeling_helium.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ROPE, ModelDescription
from shardmill.models.decoder import decoder, pairs_turned
from shardmill.models.rotary import rope


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers HeliumConfig for programs of `context` slots."""
    table, bias = rope(config, context), bool(config.attention_bias)
    return decoder(
        config,
        context,
        honours=("attention_bias", "mlp_bias"),
        ropes={ROPE: table},
        tensors=pairs_turned(config, table.dim, bias),
        qkv_bias=bias,
        mlp_bias=bool(config.mlp_bias),
    )
