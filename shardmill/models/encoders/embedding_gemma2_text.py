"""model_type embedding_gemma2_text: EmbeddingGemma 2, text only: Gemma 4's layers, whose tokens see later tokens too.

A token's row for a layer is projected from the token's embedding; there is no second table. The last hidden states are
projected in the program, token by token.

Source of the arithmetic: transformers, models/embedding_gemma2/modeling_embedding_gemma2.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import EMBED, PREFIX, SLIDING_MASK, EncoderIO, ModelDescription
from shardmill.models.decoder import graph_of
from shardmill.models.encoder import Names, encoder, task_of
from shardmill.models.families.gemma4_text import (
    check_layers,
    kinds_of,
    layer_options,
    layer_scalar,
    projected_rows,
    rotary_tables,
)

SIZES = ("embedding_dim", "hidden_size_per_layer_input", "sliding_window")
HONOURED = (*SIZES, "attention_bias", "hidden_activation", "layer_types", "per_layer_config")
AROUND = {"embedding": "model.embed_tokens.weight", "norm": "model.norm", "projection": "model.embedding_projection"}
ROLES = {
    "per_layer.gate": "ple_block.per_layer_input_gate",
    "per_layer.projection": "ple_block.per_layer_projection",
    "per_layer.norm": "ple_block.post_per_layer_input_norm",
}


def describe(config: Any, length: int) -> ModelDescription:
    """Return the description of a transformers EmbeddingGemma2TextConfig for passes of at most `length` tokens."""
    check_layers(config)
    for name in SIZES:
        if getattr(config, name) < 1:
            raise CheckpointError(f"{name} is {getattr(config, name)}: it must be 1 or more")
    width, hidden, band = config.hidden_size_per_layer_input, config.hidden_size, config.sliding_window
    tables = rotary_tables(config, length)
    kinds = kinds_of(config, length, band + 1, tables)  # in a pass of band + 1 tokens every layer sees all tokens
    model = encoder(
        config,
        length,
        HONOURED,
        Names("model.layers.{i}.", ROLES, AROUND),
        graph_of(config, tables, per_layer_table=False, **layer_options(config)),
        EncoderIO(final_norm=True, project=config.embedding_dim),
        kinds=kinds,
        ropes=tables,
        band=band if any(kind.mask == SLIDING_MASK for kind in kinds) else None,
        tensors={"layer_scale": layer_scalar(hidden)},
        task=task_of(config, {"Model": EMBED}) if config.architectures else EMBED,  # a tower's config may name none
        embedding_scale=sqrt(hidden),
    )
    rows = projected_rows(f"{PREFIX}ple.", len(kinds), width, hidden)
    return replace(model, sources={**model.sources, **rows})
