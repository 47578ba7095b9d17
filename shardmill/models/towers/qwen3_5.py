"""The vision tower of a multimodal Qwen3.5 (transformers, models/qwen3_5/modeling_qwen3_5.py, Qwen3_5VisionModel).

An image's frame is taken twice: the patches are a convolution over two frames.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.tower import Step, TowerDescription
from shardmill.models.towers import axial_rope, decoder_axes, encoder_tower

LAYER = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "qkv": "attn.qkv"}
LAYER |= {"self_attn.o_proj": "attn.proj", "mlp.up_proj": "mlp.linear_fc1", "mlp.down_proj": "mlp.linear_fc2"}
AROUND = {"patch": "patch_embed.proj", "position_table": "pos_embed", "norm": "merger.norm"}
AROUND |= {name: f"merger.{name}" for name in ("linear_fc1", "linear_fc2")}


def describe(config: Any) -> TowerDescription:
    """Return the description of the tower of a transformers Qwen3_5Config."""
    v = config.vision_config
    inner = v.hidden_size * v.spatial_merge_size**2
    return encoder_tower(
        v,
        "model.visual.",
        "blocks.{i}.",
        LAYER | AROUND,
        layers=v.depth,
        heads=v.num_heads,
        eps=1e-6,
        frames=v.temporal_patch_size,
        merge=v.spatial_merge_size,
        places=v.num_position_embeddings,
        rule="bilinear",
        connector=(Step("linear_fc1", inner, activation="gelu"), Step("linear_fc2", v.out_hidden_size)),
        rope=axial_rope(v),
        host=decoder_axes(config.text_config.rope_parameters),
    )
