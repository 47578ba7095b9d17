"""model_type nemotron_h: NVIDIA's Nemotron-H, dense. Each layer is Mamba-2, attention without a rotation, or an MLP.

Source of the arithmetic: transformers, models/nemotron_h/modeling_nemotron_h.py.
"""

from __future__ import annotations

from math import inf
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import LayerSpec, ModelDescription, Sources, TensorSource
from shardmill.models.decoder import activation, decoder, taken_for_granted
from shardmill.models.families.granitemoehybrid import mamba_sources
from shardmill.models.recurrences import Mamba2, checked_mamba

HONOURED = (
    "conv_kernel",
    "layer_norm_epsilon",
    "layers_block_type",
    "mamba_head_dim",
    "mamba_hidden_act",
    "mamba_num_heads",
    "mlp_bias",
    "mlp_hidden_act",
    "n_groups",
    "ssm_state_size",
    "time_step_limit",
    "time_step_min",
    "use_conv_bias",
)
UNREAD = (  # of initial weights, of kernels and of generation, and how transformers divides its sums
    *("chunk_size", "expand", "rescale_prenorm_residual", "time_step_floor", "time_step_max"),
    *("mtp_layers_block_type", "num_logits_to_keep", "use_mamba_kernels"),
)
EXPERTS = (  # of layers of experts, which are refused
    *("moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
    *("n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
    *("routed_scaling_factor", "topk_group"),
)
KINDS = {
    "linear_attention": LayerSpec(mixer="mamba", rope=None, mask="", ffn=""),
    "full_attention": LayerSpec(rope=None, ffn=""),
    "mlp": LayerSpec(mixer="", rope=None, mask=""),
}


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers NemotronHConfig for programs of `context` slots."""
    if unknown := sorted({*config.layers_block_type} - KINDS.keys()):
        raise CheckpointError(f"layers_block_type: {unknown[0]!r}: programs have {', '.join(KINDS)} only")
    if config.tie_word_embeddings:
        raise CheckpointError("tie_word_embeddings is true: transformers computes a nemotron_h with an LM head")
    mamba = _mamba(config)
    granted = taken_for_granted(
        config,
        {
            "attention_head_dim": config.head_dim,  # older names on the hub
            "rms_norm_eps": config.layer_norm_epsilon,
            "mamba_ssm_cache_dtype": "float32",
        },
    )
    model = decoder(
        config,
        context,
        honours=(*HONOURED, *UNREAD, *EXPERTS, *granted),
        kinds=tuple(KINDS[name] for name in config.layers_block_type),
        ropes={},
        tensors=_renamed() | mamba_sources(mamba, config.hidden_size, "mixer."),
        final_norm="norm_f.weight",
        table=TensorSource("embeddings.weight"),
        rms_norm_eps=config.layer_norm_epsilon,
        activation=activation(config, "mlp_hidden_act"),
        gated=False,
        mlp_bias=bool(config.mlp_bias),
        mamba=mamba if "linear_attention" in config.layers_block_type else None,
    )
    return model.under("backbone.")  # as on the hub


def _mamba(config: Any) -> Mamba2:
    """Return the sizes of the Mamba-2 layers. Raises CheckpointError for what programs do not support."""
    if config.mamba_hidden_act != "silu":
        raise CheckpointError(f"mamba_hidden_act is {config.mamba_hidden_act!r}: programs have Mamba-2 with SiLU only")
    if tuple(config.time_step_limit) not in ((0.0, inf), (config.time_step_min, inf)):
        said = f"time_step_limit is {config.time_step_limit}"
        raise CheckpointError(f"{said}: transformers computes a nemotron_h with time_step_min as the only limit")
    return checked_mamba(
        Mamba2(
            heads=config.mamba_num_heads,
            groups=config.n_groups,
            head_dim=config.mamba_head_dim,
            state_dim=config.ssm_state_size,
            taps=config.conv_kernel,
            conv_bias=bool(config.use_conv_bias),
            least_step=float(config.time_step_min),
        )
    )


def _renamed() -> dict[str, Sources]:
    """Return the sources of the layers' constants: a layer's one branch is its mixer, behind its one norm."""
    inner = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    inner += [f"mlp.{name}_proj.{kind}" for name in ("up", "down") for kind in ("weight", "bias")]
    sources: dict[str, Sources] = {role: TensorSource(f"mixer.{role.partition('.')[2]}") for role in inner}
    return sources | {f"{name}_layernorm.weight": TensorSource("norm.weight") for name in ("input", "post_attention")}
