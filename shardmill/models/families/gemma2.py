"""model_type gemma2: Gemma 2. Gains of 1 + weight, norms around both branches, softcaps, sliding layers in turn.

Source of the arithmetic: transformers, models/gemma2/modeling_gemma2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from shardmill.models.architecture import ModelDescription, TensorSource
from shardmill.models.decoder import activation, attention_biases, decoder, kinds_by_type, taken_for_granted

# Gemma's residual stream goes far beyond fp16's largest number: peaks of 61,040 to 292,969 were reported for Gemma 3
# (Anemll, docs/GEMMA3_FP16_SCALING.md). The norms make the model's output independent of the stream's scale.
STREAM_SCALE = 1 / 8

HONOURED = (
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
)


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Gemma2Config for programs of `context` slots."""
    window = config.sliding_window
    return decoder(
        config,
        context,
        honours=(*HONOURED, *taken_for_granted(config, {"sliding_window_size": window})),
        kinds=kinds_by_type(config.layer_types, context, window),
        window=window,
        tensors=gains(),
        **gemma_options(config),
    )


def gemma_options(config: Any) -> dict[str, Any]:
    """Return the options for `decoder` that Gemma 2 and 3 have in common."""
    return {
        "embedding_scale": sqrt(config.hidden_size),
        "activation": activation(config, "hidden_activation"),
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "score_cap": config.attn_logit_softcapping or 0.0,
        "logit_cap": config.final_logit_softcapping or 0.0,
        "stream_scale": STREAM_SCALE,
        "post_norms": True,
        **attention_biases(config),
    }


def gains() -> Mapping[str, TensorSource]:
    """Return sources of norms with gain 1 + weight; norms that write to the residual stream include its scale."""
    sources = {}
    for name, times in (
        ("input_layernorm", 1.0),
        ("post_attention_layernorm", STREAM_SCALE),
        ("pre_feedforward_layernorm", 1.0),
        ("post_feedforward_layernorm", STREAM_SCALE),
        ("norm", 1.0),
        ("self_attn.q_norm", 1.0),
        ("self_attn.k_norm", 1.0),
    ):
        sources[f"{name}.weight"] = TensorSource(f"{name}.weight", add=1.0, times=times)
    return sources
