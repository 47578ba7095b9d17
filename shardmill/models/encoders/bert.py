"""model_type bert: BERT and what was fine-tuned from it to label tokens, classify texts or embed them.

Source of the arithmetic: transformers, models/bert/modeling_bert.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import CLASSIFY, EMBED, EncoderIO, Graph, LayerSpec, ModelDescription
from shardmill.models.encoder import Names, encoder, encoder_activation, task_of

HONOURED = (
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "directionality",  # read by Google's code only, as are the pooler's sizes
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "layer_norm_eps",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "position_embedding_type",
    "type_vocab_size",
)
ROLES = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "post_feedforward_layernorm": "output.LayerNorm",
}


def describe(config: Any, length: int) -> ModelDescription:
    """Return the description of a transformers BertConfig for passes of at most `length` tokens."""
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        raise CheckpointError(f"position_embedding_type {config.position_embedding_type!r}: only 'absolute' is built")
    task = task_of(config)
    prefix = "" if task == EMBED else "bert."
    width = config.hidden_size // config.num_attention_heads
    graph = Graph(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=width,
        rope_dim=0,
        ffn=config.intermediate_size,
        rms_norm_eps=config.layer_norm_eps,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm="layer",
        norm_bias=True,
        gated=False,
        outer_norms=True,
        activation=encoder_activation(config, "hidden_act"),
    )
    pooled = task == CLASSIFY  # the pooler reads the first token, so whoever reads its row has what it gives
    ends = EncoderIO(embed_norm=True, dense="tanh" if pooled else "", dense_bias=True)
    return encoder(
        config,
        length,
        HONOURED,
        Names(f"{prefix}encoder.layer.{{i}}.", ROLES, _around(prefix), _ignored(prefix, pooled)),
        graph,
        ends,
        kinds=(LayerSpec(rope=None),) * config.num_hidden_layers,
        ropes={},
        positions=config.max_position_embeddings,
        types=config.type_vocab_size,
    )


def _around(prefix: str) -> dict[str, str]:
    """Return what the tensors outside layers are called."""
    return {
        "embedding": f"{prefix}embeddings.word_embeddings.weight",
        "positions": f"{prefix}embeddings.position_embeddings.weight",
        "types": f"{prefix}embeddings.token_type_embeddings.weight",
        "embed_norm": f"{prefix}embeddings.LayerNorm",
        "dense": f"{prefix}pooler.dense",
        "classifier": "classifier",
    }


def _ignored(prefix: str, pooled: bool) -> tuple[str, ...]:
    """Return buffers, and the pooler where nothing reads it."""
    unread = () if pooled else (f"{prefix}pooler.dense.weight", f"{prefix}pooler.dense.bias")
    return (f"{prefix}embeddings.position_ids", *unread)
