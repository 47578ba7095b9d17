"""model_type lfm2_moe: Liquid's LFM2 with experts, but for the first layers.

Source of the arithmetic: transformers, models/lfm2_moe/modeling_lfm2_moe.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import Experts, ModelDescription, Sources, TensorSource
from shardmill.models.decoder import decoder
from shardmill.models.experts import checked_experts, separate
from shardmill.models.families.lfm2 import RENAMED, convolution_taps, layer_kinds

HONOURED = (
    "conv_L_cache",
    "layer_types",
    "moe_intermediate_size",
    "norm_eps",
    "norm_topk_prob",
    "num_dense_layers",
    "num_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "use_expert_bias",
)
NORMAL_EPS = 1e-6
NAMES = {
    "gate_proj": "feed_forward.experts.{}.w1.weight",
    "up_proj": "feed_forward.experts.{}.w3.weight",
    "down_proj": "feed_forward.experts.{}.w2.weight",
}


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Lfm2MoeConfig for programs of `context` slots."""
    taps, hidden = convolution_taps(config), config.hidden_size
    experts = checked_experts(
        Experts(
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            scores="sigmoid",
            normalised=bool(config.norm_topk_prob),
            normal_eps=NORMAL_EPS,
            choice_bias=bool(config.use_expert_bias),
            scale=config.routed_scaling_factor,
        )
    )
    routers: dict[str, Sources] = {
        "mlp.router.weight": TensorSource("feed_forward.gate.weight", shape=(experts.count, hidden)),
        "mlp.choice_bias": TensorSource("feed_forward.expert_bias"),
    }
    return decoder(
        config,
        context,
        honours=HONOURED,
        kinds=layer_kinds(config.layer_types, dense=config.num_dense_layers),
        tensors={role: TensorSource(name) for role, name in RENAMED.items()}
        | taps
        | routers
        | separate(experts, hidden, NAMES),
        final_norm="embedding_norm.weight",
        rms_norm_eps=config.norm_eps,
        activation="silu",
        qk_norm="before",
        conv_taps=config.conv_L_cache,
        experts=experts,
    )
