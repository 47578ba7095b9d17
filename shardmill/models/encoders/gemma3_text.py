"""model_type gemma3_text: EmbeddingGemma, a Gemma 3 whose tokens see later tokens too.

Source of the arithmetic: transformers, models/gemma3/modeling_gemma3.py. The projections that follow the pooling are
modules of sentence-transformers, which the host computes.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import LOCAL_ROPE, ROPE, SLIDING_MASK, EncoderIO, ModelDescription
from shardmill.models.decoder import graph_of, kinds_by_type
from shardmill.models.encoder import HEAD, TEXT_TASKS, Names, encoder, task_of
from shardmill.models.families.gemma2 import gains, gemma_options
from shardmill.models.families.gemma3_text import READ
from shardmill.models.rotary import rope

HONOURED = ("use_bidirectional_attention", *(name for name in READ if name != "final_logit_softcapping"))
AROUND = {"embedding": "model.embed_tokens.weight", "norm": "model.norm"}
TABLES = {"full_attention": ROPE, "sliding_attention": LOCAL_ROPE}


def describe(config: Any, length: int) -> ModelDescription:
    """Return the description of a transformers Gemma3TextConfig for passes of at most `length` tokens."""
    if not config.use_bidirectional_attention:
        raise CheckpointError(
            "use_bidirectional_attention is not true: a decoder; give `context` in place of `buckets`"
        )
    # The config's object has half of the window that config.json names, and one more: |i - j| < window is seen.
    kinds = kinds_by_type(config.layer_types, length, config.sliding_window, sliding_rope=LOCAL_ROPE)
    slides = any(kind.mask == SLIDING_MASK for kind in kinds)
    shared = gemma_options(config)
    embedding_scale = shared.pop("embedding_scale")
    ropes = {TABLES[name]: rope(config, length, name) for name in sorted(set(config.layer_types))}
    graph = graph_of(config, ropes, qk_norm="before", **shared)
    return encoder(
        config,
        length,
        HONOURED,
        Names("model.layers.{i}.", {}, AROUND, ignored=(HEAD,)),
        graph,
        EncoderIO(final_norm=True),
        kinds=kinds,
        ropes=ropes,
        band=config.sliding_window - 1 if slides else None,
        tensors=gains(),
        task=task_of(config, TEXT_TASKS),
        embedding_scale=embedding_scale,
    )
