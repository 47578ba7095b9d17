"""model_type mixtral: Mistral with two of eight experts in the place of the MLP.

Source of the arithmetic: transformers, models/mixtral/modeling_mixtral.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import Experts, ModelDescription, TensorSource
from shardmill.models.decoder import decoder, sliding_kind
from shardmill.models.experts import checked_experts, separate

HONOURED = ("num_experts_per_tok", "num_local_experts")
UNREAD = ("router_jitter_noise",)  # noise of training
NAMES = {
    "gate_proj": "block_sparse_moe.experts.{}.w1.weight",
    "up_proj": "block_sparse_moe.experts.{}.w3.weight",
    "down_proj": "block_sparse_moe.experts.{}.w2.weight",
}


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers MixtralConfig for programs of `context` slots."""
    experts = checked_experts(Experts(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size))
    kind = sliding_kind(context, config.sliding_window, ffn="experts")
    return decoder(
        config,
        context,
        honours=(*HONOURED, *UNREAD, "sliding_window"),
        kinds=(kind,) * config.num_hidden_layers,
        window=config.sliding_window,
        tensors=mixtral_expert_tensors(experts, config.hidden_size),
        experts=experts,
    )


def mixtral_expert_tensors(experts: Experts, hidden: int) -> dict[str, Any]:
    """Return where the router and the experts lie."""
    router = TensorSource("block_sparse_moe.gate.weight", shape=(experts.count, hidden))
    return {"mlp.router.weight": router} | separate(experts, hidden, NAMES)
