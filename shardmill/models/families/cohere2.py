"""model_type cohere2: Cohere's Command R7B and Tiny Aya. Both branches read one LayerNorm; only sliding layers turn.

Source of the arithmetic: transformers, models/cohere2/modeling_cohere2.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ROPE, ModelDescription
from shardmill.models.decoder import attention_biases, decoder, kinds_by_type, pairs_turned, taken_for_granted
from shardmill.models.rotary import rope

HONOURED = ("attention_bias", "layer_norm_eps", "layer_types", "logit_scale", "sliding_window")
# Further fields of configs on the hub: the first two repeat `layer_types`, the third says how to train on many devices.
UNREAD = ("layer_switch", "sliding_window_pattern", "use_parallel_embedding")
GRANTED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",  # neighbours turn
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Cohere2Config for programs of `context` slots."""
    table, window = rope(config, context), config.sliding_window
    return decoder(
        config,
        context,
        honours=(*HONOURED, *UNREAD, *taken_for_granted(config, GRANTED)),
        kinds=kinds_by_type(config.layer_types, context, window, full_rope=None),
        ropes={ROPE: table},
        window=window,
        tensors=pairs_turned(config, table.dim, bool(config.attention_bias)),
        rms_norm_eps=config.layer_norm_eps,
        norm="layer",
        norm_bias=False,
        parallel=True,
        logit_scale=config.logit_scale,
        **attention_biases(config),
    )
