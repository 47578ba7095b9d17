"""model_type olmoe: OLMoE. Norms over all heads of query and key together, and experts in the place of the MLP.

Source of the arithmetic: transformers, models/olmoe/modeling_olmoe.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import LayerSpec, ModelDescription
from shardmill.models.decoder import attention_biases, decoder
from shardmill.models.families.qwen3_moe import expert_tensors, experts_of

HONOURED = (
    "attention_bias",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
)


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers OlmoeConfig for programs of `context` slots."""
    experts = experts_of(config, config.intermediate_size)
    return decoder(
        config,
        context,
        honours=HONOURED,
        kinds=(LayerSpec(ffn="experts"),) * config.num_hidden_layers,
        tensors=expert_tensors(experts, config.hidden_size),
        **attention_biases(config),
        qk_norm="wide",
        experts=experts,
    )
