"""model_type granitemoe: IBM Granite 3, with experts. Granite with experts in the place of the MLP.

Source of the arithmetic: transformers, models/granitemoe/modeling_granitemoe.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import Experts, LayerSpec, ModelDescription, Sources, TensorSource
from shardmill.models.decoder import decoder
from shardmill.models.experts import checked_experts, stacked
from shardmill.models.families.granite import MULTIPLIERS, granite_options

HONOURED = (
    "attention_bias",
    "num_experts_per_tok",
    "num_local_experts",
)


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers GraniteMoeConfig for programs of `context` slots."""
    experts = checked_experts(Experts(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size))
    return decoder(
        config,
        context,
        honours=(*HONOURED, *MULTIPLIERS),
        kinds=(LayerSpec(ffn="experts"),) * config.num_hidden_layers,
        tensors=expert_sources(experts, config.hidden_size),
        experts=experts,
        **granite_options(config),
    )


def expert_sources(experts: Experts, hidden: int) -> dict[str, Sources]:
    """Return the sources of a layer's router and experts."""
    path = "block_sparse_moe."
    router = TensorSource(f"{path}router.layer.weight", shape=(experts.count, hidden))
    matrices = stacked(experts, hidden, f"{path}input_linear.weight", f"{path}output_linear.weight")
    return {"mlp.router.weight": router} | matrices
