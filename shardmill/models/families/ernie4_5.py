"""model_type ernie4_5: Baidu's ERNIE 4.5, dense. Llama whose rotation turns neighbours.

Source of the arithmetic: transformers, models/ernie4_5/modeling_ernie4_5.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ROPE, ModelDescription
from shardmill.models.decoder import decoder, pairs_turned
from shardmill.models.rotary import rope


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Ernie4_5Config for programs of `context` slots."""
    table, bias = rope(config, context), bool(config.use_bias)
    return decoder(
        config,
        context,
        honours=("use_bias",),
        ropes={ROPE: table},
        tensors=pairs_turned(config, table.dim, bias),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )
