"""model_type hunyuan_v1_dense: Tencent's Hunyuan and HY-MT. Norms on query and key after the rotation.

Its rotary module turns `alpha` into a base frequency once and for all, whatever rope_type says.
Source of the arithmetic: transformers, models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import ROPE, ModelDescription, TensorSource
from shardmill.models.decoder import attention_biases, decoder, taken_for_granted
from shardmill.models.rotary import FIXED, rope

TENSORS = {
    "self_attn.q_norm.weight": TensorSource("self_attn.query_layernorm.weight"),
    "self_attn.k_norm.weight": TensorSource("self_attn.key_layernorm.weight"),
}

# What configs on the hub hold besides and transformers does not read: its models have the norms, and share no cache.
UNREAD = (
    *("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "pool_type", "use_qk_norm"),
    *("im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "org_vocab_size", "pad_id"),
    *("text_end_id", "text_start_id"),
)


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers HunYuanDenseV1Config for programs of `context` slots."""
    parameters = config.rope_parameters
    if parameters["rope_type"] == "dynamic" and not parameters.get("alpha"):
        raise CheckpointError("rope_parameters: of rope_type dynamic but without alpha: frequencies would change")
    return decoder(
        config,
        context,
        honours=("attention_bias", *UNREAD, *taken_for_granted(config, {"norm_type": "rms"})),
        ropes={ROPE: rope(config, context, fixed=(*FIXED, "dynamic"))},
        tensors=TENSORS,
        **attention_biases(config),
        qk_norm="after",
    )
