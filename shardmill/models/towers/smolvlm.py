"""The vision tower of SmolVLM and SmolVLM2 (transformers, models/smolvlm/modeling_smolvlm.py).

It takes square images of one size alone: a picture is cut into such tiles.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.tower import Step, TowerDescription
from shardmill.models.towers import check_fractions, encoder_tower

LAYER = {
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
    "self_attn.o_proj": "self_attn.out_proj",
}
LAYER |= {f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"}
LAYER |= {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
AROUND = {"patch": "embeddings.patch_embedding", "position_table": "embeddings.position_embedding"}
AROUND |= {"norm": "post_layernorm"}


def describe(config: Any) -> TowerDescription:
    """Return the description of the tower of a transformers SmolVLMConfig or Idefics3Config."""
    v, width = config.vision_config, config.text_config.hidden_size
    side = check_fractions(v.image_size // v.patch_size)
    return encoder_tower(
        v,
        "model.vision_model.",
        "encoder.layers.{i}.",
        LAYER | AROUND,
        layers=v.num_hidden_layers,
        heads=v.num_attention_heads,
        eps=v.layer_norm_eps,
        merge=config.scale_factor,
        places=side * side,
        rule="whole",
        connector=(Step("modality_projection", width, bias=False),),
        elsewhere={"modality_projection": "model.connector.modality_projection.proj"},
        host={"grid": [side, side]},
    )
