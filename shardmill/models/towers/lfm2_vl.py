"""The vision tower of LFM2-VL (transformers, models/lfm2_vl/modeling_lfm2_vl.py), whose layers are SigLIP 2's.

A picture may have any shape: it takes its positions from a table that is resized to the picture's patches. The tensors
of published checkpoints lie one module deeper than those that transformers writes today.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.encoder import encoder_activation
from shardmill.models.tower import Step, TowerDescription
from shardmill.models.towers import encoder_tower
from shardmill.models.towers.smolvlm import AROUND, LAYER

PROJECTOR = "model.multi_modal_projector."


def describe(config: Any) -> TowerDescription:
    """Return the description of the tower of a transformers Lfm2VlConfig."""
    v = config.vision_config
    if v.vision_use_head:
        raise CheckpointError("vision_config: vision_use_head is true: programs have no head after the tower's layers")
    norm = (Step("layer_norm", eps=1e-5),) if config.projector_use_layernorm else ()
    first = Step(
        "linear_1",
        config.projector_hidden_size,
        bias=config.projector_bias,
        activation=encoder_activation(config, "projector_hidden_act"),
    )
    steps = (*norm, first, Step("linear_2", config.text_config.hidden_size, bias=config.projector_bias))
    return encoder_tower(
        v,
        "model.vision_tower.",
        "encoder.layers.{i}.",
        LAYER | AROUND,
        layers=v.num_hidden_layers,
        heads=v.num_attention_heads,
        eps=v.layer_norm_eps,
        merge=config.downsample_factor,
        places=v.num_patches,
        rule="antialiased",
        connector=steps,
        elsewhere={step.name: f"{PROJECTOR}{step.name}" for step in steps},
        flat=True,
        older="model.vision_tower.vision_model.",
    )
