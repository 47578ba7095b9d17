"""The tower of Qwen3-ASR, for sounds (transformers, models/qwen3_asr/modeling_qwen3_asr.py, Qwen3ASREncoder).

Convolutions and positions see a chunk of frames, and layers see a window of chunks. So one program of a window, run
for each window of a sound, gives the rows of a sound of any length, and a shorter program those of a shorter window.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import Graph, Sources, TensorSource
from shardmill.models.encoder import encoder_activation
from shardmill.models.part_kinds import tower_spec
from shardmill.models.tower import (
    CONVOLUTIONS,
    Convolutions,
    Step,
    TowerArchitecture,
    TowerDescription,
    TowerIO,
    constants_of_tower,
)

ROLES = {"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm"}
ROLES |= {"self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2"}
AROUND = {"conv1": "conv2d1", "conv2": "conv2d2", "conv3": "conv2d3", "patch": "conv_out", "norm": "ln_post"}
ENCODER, PROJECTOR = "model.audio_tower.", "model.multi_modal_projector."
BASE = 10_000  # of the waves that positions are
EPS = 1e-5  # of PyTorch's LayerNorm
ROWS = 13  # of a chunk; a constant in transformers' count of a sound's rows
MOST = {"d_model": 1 << 13, "encoder_ffn_dim": 1 << 15, "encoder_layers": 1 << 9, "downsample_hidden_size": 1 << 12}
MOST |= {"num_mel_bins": 1 << 10, "n_window": 1 << 10, "n_window_infer": 1 << 14}  # that are believed


def describe(config: Any) -> TowerDescription:
    """Return the description of the tower of a transformers Qwen3ASRConfig.

    Raises:
        CheckpointError: if programs can't be built with these numbers.
    """
    a = config.audio_config
    for name, most in MOST.items():
        if not 1 <= getattr(a, name) <= most:
            raise CheckpointError(f"audio_config: {name} is {getattr(a, name)}: it must be 1 to {most}")
    d, heads, sound = a.d_model, a.encoder_attention_heads, Convolutions(a.num_mel_bins, 2 * a.n_window, 0)
    sound = Convolutions(sound.bins, sound.frames, a.downsample_hidden_size)
    if heads < 1 or d % heads or d % 2:
        raise CheckpointError(f"audio_config: {heads} heads do not divide d_model {d}, or it is odd")
    if sound.tokens != ROWS or a.max_position_embeddings < ROWS or a.n_window_infer % sound.frames:
        raise CheckpointError("audio_config: n_window, n_window_infer or max_position_embeddings have no program")
    graph = Graph(
        hidden=d, heads=heads, kv_heads=heads, head_dim=d // heads, rope_dim=d // heads, ffn=a.encoder_ffn_dim,
        rms_norm_eps=EPS, qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, norm="layer",
        activation=encoder_activation(a, "activation_function"),
    )  # fmt: skip
    connector = (Step("linear_1", d, activation=graph.activation), Step("linear_2", a.output_dim))
    io = TowerIO(sound.channels * sound.height, patch_bias=False, connector=connector, convolutions=sound)
    host = {"chunk": sound.frames, "rows": ROWS, "window": a.n_window_infer, "merge": 1}
    tower = TowerArchitecture(graph, a.encoder_layers, io, False, host | {"waves": {"channels": d, "base": BASE}})

    def source(path: str) -> Sources:
        module, _, kind = path.rpartition(".")
        if module.startswith("linear_"):
            return TensorSource(f"{PROJECTOR}{module}.{kind}")
        if module.startswith("layers."):
            _, index, role = module.split(".", 2)
            return TensorSource(f"{ENCODER}layers.{index}.{ROLES.get(role, role)}.{kind}")
        columns = 1 if module == CONVOLUTIONS[0] else sound.channels
        kernel = (sound.channels, columns, 3, 3) if module in CONVOLUTIONS and kind == "weight" else None
        return TensorSource(f"{ENCODER}{AROUND[module]}.{kind}", shape=kernel)

    return TowerDescription(tower, {path: source(path) for path in constants_of_tower(tower_spec(tower, 0))})
