"""model_type granitemoehybrid: IBM Granite 4 of attention layers only, without experts. Granite under other names.

Source of the arithmetic: transformers, models/granitemoehybrid/modeling_granitemoehybrid.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import ROPE, LayerSpec, ModelDescription, TensorSource
from shardmill.models.decoder import decoder, rope, row_halves, taken_for_granted
from shardmill.models.families.granite import MULTIPLIERS, granite_options

HONOURED = ("attention_bias", "layer_types", "position_embedding_type", "shared_intermediate_size")
# Fields of what these models lack: experts, and Mamba layers, whose other fields begin with MAMBA.
WITHOUT = ("num_experts_per_tok", "num_local_experts", "time_step_limit")
MAMBA = "mamba_"
UNREAD = ("init_method",)  # of training
GRANTED = {"normalization_function": "rmsnorm"}
ATTENTION = {"attention", "full_attention"}  # on the hub, and in transformers


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers GraniteMoeHybridConfig for programs of `context` slots."""
    if config.num_local_experts:
        raise CheckpointError(f"num_local_experts is {config.num_local_experts}: programs lack experts beside an MLP")
    if strange := sorted(set(config.layer_types) - ATTENTION):
        raise CheckpointError(f"layer_types: {strange[0]!r}: {config.model_type} programs have attention layers only")
    turns, ffn = config.position_embedding_type == "rope", config.shared_intermediate_size
    mamba = tuple(name for name in config.to_dict() if name.startswith(MAMBA))
    return decoder(
        config,
        context,
        honours=(*HONOURED, *MULTIPLIERS, *WITHOUT, *mamba, *UNREAD, *taken_for_granted(config, GRANTED)),
        kinds=(LayerSpec(rope=ROPE if turns else None),) * config.num_hidden_layers,
        ropes={ROPE: rope(config, context)} if turns else {},
        tensors=row_halves("shared_mlp.input_linear.weight", ffn, config.hidden_size)
        | {"mlp.down_proj.weight": TensorSource("shared_mlp.output_linear.weight")},
        ffn=ffn,
        **granite_options(config),
    )
