"""model_type modernbert: ModernBERT and what was fine-tuned from it to label tokens, classify texts or embed them.

Source of the arithmetic: transformers, models/modernbert/modeling_modernbert.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import (
    CLASSIFY,
    EMBED,
    LOCAL_ROPE,
    ROPE,
    SLIDING_MASK,
    EncoderIO,
    Graph,
    LayerSpec,
    ModelDescription,
)
from shardmill.models.encoder import Names, encoder, encoder_activation, task_of
from shardmill.models.rotary import rope

HONOURED = (
    "attention_bias",
    "classifier_activation",
    "classifier_bias",
    "classifier_dropout",
    "classifier_pooling",
    "decoder_bias",  # of masked language models
    "deterministic_flash_attn",
    "embedding_dropout",
    "global_attn_every_n_layers",  # transformers derives layer_types from it
    "global_rope_theta",  # and rope_parameters of these
    "hidden_activation",
    "initializer_cutoff_factor",
    "layer_norm_eps",  # in configs on the hub, where norm_eps is what is read
    "layer_types",
    "local_attention",
    "local_rope_theta",
    "mlp_bias",
    "mlp_dropout",
    "norm_bias",
    "norm_eps",
    "position_embedding_type",  # in configs on the hub, read by nothing
    "reference_compile",
    "repad_logits_with_grad",
    "sparse_pred_ignore_index",
    "sparse_prediction",
)
ROLES = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn.Wqkv",
    "self_attn.o_proj": "attn.Wo",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_up_proj": "mlp.Wi",
    "mlp.down_proj": "mlp.Wo",
}
TABLES = {"full_attention": ROPE, "sliding_attention": LOCAL_ROPE}


def describe(config: Any, length: int) -> ModelDescription:
    """Return the description of a transformers ModernBertConfig for passes of at most `length` tokens."""
    task = task_of(config)
    if task == CLASSIFY and config.classifier_pooling != "cls":
        raise CheckpointError(f"classifier_pooling {config.classifier_pooling!r}: programs have 'cls' only")
    unknown = sorted(set(config.layer_types) - TABLES.keys())
    if unknown:
        raise CheckpointError(f"layer_types: {unknown[0]!r}: programs have {' and '.join(TABLES)} only")
    prefix = "" if task == EMBED else "model."
    width = config.hidden_size // config.num_attention_heads
    graph = Graph(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=width,
        rope_dim=width,
        ffn=config.intermediate_size,
        rms_norm_eps=config.norm_eps,
        fused=True,
        qkv_bias=bool(config.attention_bias),
        o_bias=bool(config.attention_bias),
        mlp_bias=bool(config.mlp_bias),
        norm="layer",
        norm_bias=bool(config.norm_bias),
        activation=encoder_activation(config, "hidden_activation"),
    )
    ends = EncoderIO(embed_norm=True, final_norm=True)
    if task != EMBED:
        dense = encoder_activation(config, "classifier_activation")
        ends = EncoderIO(True, True, dense=dense, dense_bias=bool(config.classifier_bias), dense_norm=True)
    around = {
        "embedding": f"{prefix}embeddings.tok_embeddings.weight",
        "embed_norm": f"{prefix}embeddings.norm",
        "norm": f"{prefix}final_norm",
        "dense": "head.dense",
        "dense_norm": "head.norm",
        "classifier": "classifier",
    }
    return encoder(
        config,
        length,
        HONOURED,
        Names(f"{prefix}layers.{{i}}.", ROLES, around),
        graph,
        ends,
        kinds=tuple(_kind(i, name) for i, name in enumerate(config.layer_types)),
        ropes={TABLES[name]: rope(config, length, name) for name in sorted(set(config.layer_types))},
        band=config.sliding_window if "sliding_attention" in config.layer_types else None,
    )


def _kind(index: int, layer_type: str) -> LayerSpec:
    """Return a layer; what the first one reads is normed already."""
    if layer_type == "full_attention":
        return LayerSpec(normed=index > 0)
    return LayerSpec(rope=LOCAL_ROPE, mask=SLIDING_MASK, normed=index > 0)
