"""model_type gemma3_text: Gemma 3, text only. Gemma 2 with norms on query and key, and rotary tables by layer type.

Source of the arithmetic: transformers, models/gemma3/modeling_gemma3.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import LOCAL_ROPE, ROPE, ModelDescription
from shardmill.models.decoder import decoder, kinds_by_type
from shardmill.models.families.gemma2 import HONOURED, gains, gemma_options
from shardmill.models.rotary import rope

# transformers keeps the field and never reads it for Gemma 3; no release sets it, so what it would mean is unknown.
UNREAD = "attn_logit_softcapping"
READ = (*(name for name in HONOURED if name != UNREAD), "rope_local_base_freq", "sliding_window_pattern")


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Gemma3TextConfig for programs of `context` slots."""
    window, types = config.sliding_window, {ROPE: "full_attention", LOCAL_ROPE: "sliding_attention"}
    tables = {name: rope(config, context, kind) for name, kind in types.items() if kind in config.layer_types}
    return decoder(
        config,
        context,
        honours=READ,
        kinds=kinds_by_type(config.layer_types, context, window, sliding_rope=LOCAL_ROPE),
        ropes=tables,
        window=window,
        tensors=gains(),
        qk_norm="before",
        **gemma_options(config),
    )
