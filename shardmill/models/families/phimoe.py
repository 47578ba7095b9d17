"""model_type phimoe: Phi-3.5-MoE. LayerNorm, biases, and two of sixteen experts by SparseMixer.

Source of the arithmetic: transformers, models/phimoe/modeling_phimoe.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import ROPE, Experts, ModelDescription, Rope
from shardmill.models.decoder import attention_biases, decoder, sliding_kind
from shardmill.models.experts import checked_experts
from shardmill.models.families.mixtral import mixtral_expert_tensors
from shardmill.models.rotary import rope

HONOURED = (
    "attention_bias",
    "input_jitter_noise",  # noise of training
    "lm_head_bias",
    "num_experts_per_tok",
    "num_local_experts",
    "router_jitter_noise",
    "sliding_window",
)
CHOSEN = 2  # SparseMixer chooses no other number


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers PhimoeConfig for programs of `context` slots."""
    if config.num_experts_per_tok != CHOSEN:
        raise CheckpointError(f"num_experts_per_tok is {config.num_experts_per_tok}: SparseMixer chooses {CHOSEN}")
    experts = checked_experts(
        Experts(
            config.num_local_experts,
            CHOSEN,
            config.intermediate_size,
            scores="sparsemixer",
            jitter=config.router_jitter_noise,
        )
    )
    table = rope(config, context)
    if table.factors == "long":
        raise CheckpointError(
            f"context {context} is over the original length: there transformers combines PhiMoE's long scale with its "
            "short factors, and it is not known which of them is right; lower context in the config"
        )
    kind = sliding_kind(context, config.sliding_window, ffn="experts")
    return decoder(
        config,
        context,
        honours=HONOURED,
        kinds=(kind,) * config.num_hidden_layers,
        ropes={ROPE: _scaled(config, table)},
        window=config.sliding_window,
        tensors=mixtral_expert_tensors(experts, config.hidden_size),
        norm="layer",
        **attention_biases(config),
        head_bias=bool(config.lm_head_bias),
        experts=experts,
    )


def _scaled(config: Any, table: Rope) -> Rope:
    """Return the table with this family's own factor in place of LongRoPE's."""
    if config.rope_parameters["rope_type"] == "default":
        return table
    return replace(table, scale=config.rope_parameters[f"{table.factors}_mscale"])
