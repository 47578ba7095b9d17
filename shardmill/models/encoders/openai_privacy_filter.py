"""model_type openai_privacy_filter: OpenAI's privacy filter, which labels tokens. Banded attention and 128 experts.

Source of the arithmetic: transformers, models/openai_privacy_filter/modeling_openai_privacy_filter.py. Its routing
weights are divided by the number of experts that a token takes, and their sum multiplied with it, which is nothing.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import (
    LABEL,
    ROPE,
    SILU,
    SLIDING_MASK,
    EncoderIO,
    LayerSpec,
    ModelDescription,
    Sources,
    TensorSource,
)
from shardmill.models.decoder import graph_of, halved
from shardmill.models.encoder import Names, encoder, task_of
from shardmill.models.experts import transposed
from shardmill.models.families.gpt_oss import gpt_oss_experts
from shardmill.models.rotary import rope

HONOURED = (
    "attention_bias",
    "classifier_dropout",
    "num_experts_per_tok",
    "num_local_experts",
    "sliding_window",
    "swiglu_alpha",
    "swiglu_limit",
)
AROUND = {"embedding": "model.embed_tokens.weight", "norm": "model.norm", "classifier": "score"}


def describe(config: Any, length: int) -> ModelDescription:
    """Return the description of a transformers OpenAIPrivacyFilterConfig for passes of at most `length` tokens."""
    if task_of(config) != LABEL:
        raise CheckpointError(f"architectures: {config.architectures[0]!r}: this family only labels tokens")
    experts = gpt_oss_experts(config)
    bias = bool(config.attention_bias)
    ropes = {ROPE: rope(config, length)}
    graph = graph_of(
        config,
        ropes,
        activation=SILU,
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        experts=experts,
    )
    tensors: dict[str, Sources] = {
        "mlp.router.weight": TensorSource("mlp.router.weight", shape=(experts.count, config.hidden_size)),
        **transposed(experts, config.hidden_size, "mlp.experts.", interleaved=False),
    }
    for role, heads in (("q_proj", graph.heads), ("k_proj", graph.kv_heads)):
        for name in ("weight", "bias") if bias else ("weight",):
            tensors[f"self_attn.{role}.{name}"] = halved(f"self_attn.{role}.{name}", heads, *[config.head_dim] * 2)
    return encoder(
        config,
        length,
        HONOURED,
        Names("model.layers.{i}.", {}, AROUND),
        graph,
        EncoderIO(final_norm=True),
        kinds=(LayerSpec(mask=SLIDING_MASK, ffn="experts"),) * config.num_hidden_layers,
        ropes=ropes,
        band=config.sliding_window,
        tensors=tensors,
    )
