"""model_type qwen3_5_text: Qwen3.5, text only. Gated DeltaNet layers, and gated attention on every fourth layer.

Source of the arithmetic: transformers, models/qwen3_5/modeling_qwen3_5.py. Qwen3.6 and dense Qwen3.8 have the same
model_type. The rotary table has three axes of positions, which are equal for text. The layer that predicts a further
token (`mtp.`) is described in models/mtp.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import LayerSpec, ModelDescription, Sources, TensorSource
from shardmill.models.contract import DECAY_SCALE
from shardmill.models.decoder import activation, decoder, taken_for_granted
from shardmill.models.recurrences import MOST_TAPS, DeltaNet

HONOURED = (
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mtp_num_hidden_layers",
)
# Fields of configs on the hub that transformers does not read, with what it computes.
GRANTED = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "attention_bias": False}
UNREAD = ("full_attention_interval", "mtp_use_dedicated_embeddings", "output_gate_type", "partial_rotary_factor")
GATES = ("swish", "silu")
# The deep layers of the 27B model leave fp16's range, and scaling its stream mended this on a Neural Engine (ANEForge,
# pull request 51, which says so of no smaller model). What writes to the stream reads less, instead of having smaller
# weights: INT8 scales of so small weights would be subnormal in fp16.
WIDE, STREAM_SCALE = 5120, 1 / 32
KINDS = {"full_attention": LayerSpec(), "linear_attention": LayerSpec(mixer="delta", rope=None, mask="")}


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Qwen3_5TextConfig for programs of `context` slots."""
    inner = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    return hybrid(config, context, drafting=inner)


def hybrid(
    config: Any,
    context: int,
    *,
    honours: Collection[str] = (),
    branch: str = "mlp",
    tensors: Mapping[str, Sources] | None = None,
    drafting: Sequence[str] = (),
    **options: Any,
) -> ModelDescription:
    """Return the description of a Qwen3.5, with MLPs or with experts.

    Args:
        config: transformers' config.
        context: key/value slots of the programs.
        honours: fields of the config that are read besides the fields of a model with MLPs.
        branch: the kind of each layer's feed-forward block, "mlp" or "experts".
        tensors: the sources of this block's constants.
        drafting: the names of the tensors of this block in the layer that predicts a further token.
        options: the options of the Graph.

    Raises:
        CheckpointError: if the config has a setting that the programs can't honour.
    """
    delta = _delta(config)
    granted = taken_for_granted(config, GRANTED)
    if getattr(config, "output_gate_type", GATES[0]) not in GATES:
        raise CheckpointError(f"output_gate_type is {config.output_gate_type!r}: programs have swish only")
    if activation(config, "hidden_act") != "silu":  # of the convolutions, too
        raise CheckpointError(f"hidden_act is {config.hidden_act!r}: programs have a DeltaNet with SiLU only")
    unknown = sorted({*config.layer_types} - KINDS.keys())
    if unknown:
        raise CheckpointError(f"layer_types: {unknown[0]!r}: programs have {' and '.join(KINDS)} only")
    scale = stream_scale(config)
    mixers = _query_and_gate(config) | _recurrence(delta, config.hidden_size, scale)
    model = decoder(
        config,
        context,
        honours=(*HONOURED, *honours, *UNREAD, *granted),
        kinds=tuple(replace(KINDS[name], ffn=branch) for name in config.layer_types),
        tensors=_gains() | mixers | dict(tensors or {}),
        qk_norm="before",
        output_gate=True,
        stream_scale=scale,
        output_scale=scale,
        delta=delta if "linear_attention" in config.layer_types else None,
        **options,
    )
    return replace(model, ignored=(*model.ignored, *_drafting(config, drafting)))


def stream_scale(config: Any) -> float:
    """Return how many times the model's the residual stream is in the programs."""
    return STREAM_SCALE if config.hidden_size >= WIDE and not getattr(config, "num_experts", 0) else 1.0


def _delta(config: Any) -> DeltaNet:
    """Return the sizes of the DeltaNet layers. Raises CheckpointError for sizes that programs do not support."""
    delta = DeltaNet(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
    )
    for name, size in vars(delta).items():
        if size < 1:
            raise CheckpointError(f"the {name} of the linear attention is {size}: it must be 1 or more")
    if delta.value_heads % delta.key_heads:
        heads = f"linear_num_value_heads {delta.value_heads}"
        raise CheckpointError(f"{heads} is no multiple of linear_num_key_heads {delta.key_heads}")
    if not 1 < delta.taps <= MOST_TAPS:
        raise CheckpointError(f"linear_conv_kernel_dim is {delta.taps}: programs have 2 to {MOST_TAPS} taps")
    return delta


def _gains() -> dict[str, Sources]:
    """Return the sources of the norms with gain 1 + weight: all but the norm of DeltaNet."""
    named = ("norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    return {f"{name}.weight": TensorSource(f"{name}.weight", add=1.0) for name in named}


def _query_and_gate(config: Any) -> dict[str, Sources]:
    """Return the sources of the query's and the gate's projection, which lie head by head in one tensor."""
    heads, width, tensor = config.num_attention_heads, config.head_dim, "self_attn.q_proj.weight"
    shape = (2 * heads * width, config.hidden_size)
    firsts = {"self_attn.q_proj.weight": 0, "self_attn.gate_proj.weight": width}
    return {
        role: tuple(
            TensorSource(tensor, rows=(row, row + width, 1), shape=shape)
            for row in range(first, 2 * heads * width, 2 * width)
        )
        for role, first in firsts.items()
    }


def _recurrence(delta: DeltaNet, hidden: int, scale: float) -> dict[str, Sources]:
    """Return the sources of a DeltaNet layer's constants whose names or values are not the checkpoint's.

    The gain of its last norm includes the stream's scale.
    """
    path, heads = "linear_attn.", delta.value_heads
    sources: dict[str, Sources] = {
        f"{path}tap_{j}": TensorSource(f"{path}conv1d.weight", column=j, shape=(delta.mixed, 1, delta.taps))
        for j in range(delta.taps)
    }
    sources[f"{path}in_proj_ba.weight"] = tuple(
        TensorSource(f"{path}in_proj_{name}.weight", shape=(heads, hidden)) for name in "ba"
    )
    sources[f"{path}norm.weight"] = TensorSource(f"{path}norm.weight", times=scale)
    return sources | {f"{path}rate": TensorSource(f"{path}A_log", exp=True, times=-DECAY_SCALE)}


def _drafting(config: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tensors that predict further tokens, which no program of the model has.

    Args:
        config: transformers' config.
        names: of tensors of a layer, without its norms and its attention.
    """
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    drafting = [f"mtp.{name}.weight" for name in ("fc", *norms)]
    inner = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    inner += ["input_layernorm", "post_attention_layernorm"]
    for i in range(getattr(config, "mtp_num_hidden_layers", 0) or 0):
        drafting += [f"mtp.layers.{i}.{name}" for name in (*(f"{name}.weight" for name in inner), *names)]
    return tuple(drafting)
