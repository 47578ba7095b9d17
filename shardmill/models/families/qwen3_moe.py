"""model_type qwen3_moe: Qwen 3 with experts in the place of the MLP.

Source of the arithmetic: transformers, models/qwen3_moe/modeling_qwen3_moe.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import Experts, ModelDescription, Sources, TensorSource
from shardmill.models.decoder import attention_biases, decoder, sliding_kind, taken_for_granted
from shardmill.models.experts import checked_experts, separate
from shardmill.models.families.qwen2 import WINDOWS

HONOURED = (
    "attention_bias",
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
)
GRANTED = {"use_qk_norm": True}  # Qwen3-Coder's, which transformers does not read
NAMES = {role: f"mlp.experts.{{}}.{role}.weight" for role in ("gate_proj", "up_proj", "down_proj")}


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Qwen3MoeConfig for programs of `context` slots."""
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        field = "mlp_only_layers" if config.mlp_only_layers else "decoder_sparse_step"
        raise CheckpointError(f"{field} is {getattr(config, field)!r}: programs have experts in every layer only")
    window = config.sliding_window if config.use_sliding_window else None
    experts = experts_of(config, config.moe_intermediate_size)
    return decoder(
        config,
        context,
        honours=(*WINDOWS, *HONOURED, *taken_for_granted(config, GRANTED)),
        kinds=(sliding_kind(context, window, ffn="experts"),) * config.num_hidden_layers,
        window=window,
        tensors=expert_tensors(experts, config.hidden_size),
        **attention_biases(config),
        qk_norm="before",
        experts=experts,
    )


def experts_of(config: Any, ffn: int) -> Experts:
    """Return the experts of a config that says how many there are as Qwen's does.

    Args:
        config: the checkpoint's.
        ffn: the width of one expert.
    """
    normalised = bool(config.norm_topk_prob)
    return checked_experts(Experts(config.num_experts, config.num_experts_per_tok, ffn, normalised=normalised))


def expert_tensors(experts: Experts, hidden: int) -> dict[str, Sources]:
    """Return where the router and the experts lie."""
    router = TensorSource("mlp.gate.weight", shape=(experts.count, hidden))
    return {"mlp.router.weight": router} | separate(experts, hidden, NAMES)
