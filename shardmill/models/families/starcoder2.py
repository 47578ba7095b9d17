"""model_type starcoder2: BigCode's StarCoder2 for code. LayerNorm, biases, an MLP without a gate, perhaps a window.

Source of the arithmetic: transformers, models/starcoder2/modeling_starcoder2.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription, TensorSource
from shardmill.models.decoder import decoder, sliding_kind, taken_for_granted

MLP = {"up_proj": "c_fc", "down_proj": "c_proj"}  # our names -> the checkpoint's


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Starcoder2Config for programs of `context` slots."""
    window, bias = config.sliding_window, bool(config.use_bias)
    granted = {  # what published configs say and transformers does not read
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": config.norm_epsilon,
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    }
    return decoder(
        config,
        context,
        honours=("norm_epsilon", "sliding_window", "use_bias", *taken_for_granted(config, granted)),
        kinds=(sliding_kind(context, window),) * config.num_hidden_layers,
        window=window,
        tensors={
            f"mlp.{ours}.{name}": TensorSource(f"mlp.{theirs}.{name}")
            for ours, theirs in MLP.items()
            for name in ("weight", "bias")
        },
        rms_norm_eps=config.norm_epsilon,
        norm="layer",
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )
