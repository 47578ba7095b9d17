"""model_type zaya: Zyphra's ZAYA1. Convolutional attention, scaled residuals, one of sixteen experts or none.

Source of the arithmetic: transformers, models/zaya/modeling_zaya.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import MASK, ROPE, Experts, LayerSpec, ModelDescription, Sources, TensorSource
from shardmill.models.decoder import decoder
from shardmill.models.experts import checked_experts, stacked
from shardmill.models.rotary import rope

HONOURED = (
    "cca_time0",
    "cca_time1",
    "layer_types",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "router_hidden_size",
)
HYBRID = "hybrid"
LEGACY = {
    ".qkv.linear_": "the layout of ZAYA1-8B-legacy and ZAYA1-base; take Zyphra/ZAYA1-8B, which transformers reads"
}
TAPS = 3  # two convolutions of two taps each see this token and the two before it


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers ZayaConfig for programs of `context` slots."""
    _check(config)
    hidden, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    experts = checked_experts(
        Experts(
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            normalised=False,
            choice_bias=True,
            skips=True,
            router="mlp",
            router_width=config.router_hidden_size,
        )
    )
    first, other = (LayerSpec(mixer="cca", ffn="experts", mask=MASK, carries=carries) for carries in (False, True))
    model = decoder(
        config,
        context,
        honours=HONOURED,
        kinds=(first, *(other,) * (config.num_hidden_layers - 1)),
        ropes={ROPE: rope(config, context, HYBRID)},
        tensors=_attention(config, heads)
        | _router(experts, hidden)
        | stacked(experts, hidden, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        table=TensorSource("embed_tokens.weight", plus="input_hidden_states_bias", by="input_hidden_states_scale"),
        ffn=experts.ffn,
        conv_taps=TAPS,
        residual_scales=True,
        experts=experts,
    )
    return replace(model, foreign=LEGACY)


def _check(config: Any) -> None:
    """Raise CheckpointError for settings that programs do not support."""
    if set(config.layer_types) != {HYBRID}:
        raise CheckpointError(f"layer_types: {sorted(set(config.layer_types))}: programs have {HYBRID!r} layers only")
    if (config.cca_time0, config.cca_time1) != (2, 2):
        raise CheckpointError(f"cca_time0, cca_time1 are {config.cca_time0}, {config.cca_time1}: programs have 2, 2")


def _attention(config: Any, heads: int) -> dict[str, Sources]:
    """Return where the constants of the convolutional attention lie."""
    path, width = "self_attn.qkv_proj.", heads * config.head_dim
    sources: dict[str, Sources] = {
        f"self_attn.{name}.weight": TensorSource(f"{path}{name}.weight")
        for name in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
    }
    for name, middle in (("depthwise", 1), ("grouped", config.head_dim)):
        tensor = f"{path}conv_qk_{name}"
        for tap in range(2):
            source = TensorSource(f"{tensor}.weight", column=tap, shape=(width, middle, 2))
            sources[f"self_attn.{name}.tap_{tap}"] = source
        sources[f"self_attn.{name}.bias"] = TensorSource(f"{tensor}.bias")
    gain = TensorSource("self_attn.qk_norm.temp", repeat=config.head_dim, shape=(config.num_key_value_heads,))
    return sources | {"self_attn.k_gain": gain}


def _router(experts: Experts, hidden: int) -> dict[str, Sources]:
    """Return where the constants of the router lie."""
    path, width = "mlp.gate.", experts.router_width
    matrices = {
        "down_proj": ("down_proj.weight", (width, hidden)),
        "fc1": ("router_mlp.fc1.weight", (width, width)),
        "fc2": ("router_mlp.fc2.weight", (width, width)),
        "out_proj": ("router_mlp.out_proj.weight", (experts.classes, width)),
    }
    sources: dict[str, Sources] = {
        f"mlp.router.{role}.weight": TensorSource(path + name, shape=shape) for role, (name, shape) in matrices.items()
    }
    vectors = {
        "down_proj.bias": "down_proj.bias",
        "states_scale": "router_states_scale",
        "norm.weight": "router_mlp.norm.weight",
        "fc1.bias": "router_mlp.fc1.bias",
        "fc2.bias": "router_mlp.fc2.bias",
    }
    sources |= {f"mlp.router.{role}": TensorSource(path + name) for role, name in vectors.items()}
    return sources | {"mlp.choice_bias": TensorSource(f"{path}balancing_biases")}
