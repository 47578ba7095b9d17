"""model_type granitemoehybrid: IBM Granite 4. Granite under other names; its H models have Mamba-2, some have experts.

Source of the arithmetic: transformers, models/granitemoehybrid/modeling_granitemoehybrid.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import ROPE, Experts, LayerSpec, ModelDescription, Sources, TensorSource
from shardmill.models.contract import DECAY_SCALE
from shardmill.models.decoder import activation, decoder, row_halves, taken_for_granted
from shardmill.models.experts import checked_experts
from shardmill.models.families.granite import MULTIPLIERS, granite_options
from shardmill.models.families.granitemoe import expert_sources
from shardmill.models.recurrences import Mamba2, checked_mamba
from shardmill.models.rotary import rope

HONOURED = ("attention_bias", "layer_types", "position_embedding_type", "shared_intermediate_size")
EXPERTS = ("num_experts_per_tok", "num_local_experts")
MAMBA = (
    "mamba_chunk_size",  # of transformers' sums, whose result does not depend on it
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",  # transformers refuses all but heads times their width, divided by the model's width
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_proj_bias",
    "time_step_limit",
)
UNREAD = ("init_method",)  # of training
GRANTED = {"normalization_function": "rmsnorm"}
ATTENTION, RECURRENCE = {"attention", "full_attention"}, {"mamba", "linear_attention"}  # on the hub, in transformers
MAMBA_LAYER = LayerSpec(mixer="mamba", rope=None, mask="")


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers GraniteMoeHybridConfig for programs of `context` slots."""
    if strange := sorted(set(config.layer_types) - ATTENTION - RECURRENCE):
        raise CheckpointError(f"layer_types: {strange[0]!r}: programs have attention and Mamba-2 only")
    turns, ffn = config.position_embedding_type == "rope", config.shared_intermediate_size
    recurs = not RECURRENCE.isdisjoint(config.layer_types)
    mamba = _mamba(config) if recurs else None
    count, chosen = config.num_local_experts, config.num_experts_per_tok
    experts = checked_experts(Experts(count, chosen, config.intermediate_size, beside=True)) if count else None
    kinds = (LayerSpec(rope=ROPE if turns else None), MAMBA_LAYER)
    attention, recurrence = (replace(kind, ffn="experts" if experts else "mlp") for kind in kinds)
    mlp = row_halves("shared_mlp.input_linear.weight", ffn, config.hidden_size)
    mlp |= {"mlp.down_proj.weight": TensorSource("shared_mlp.output_linear.weight")}
    return decoder(
        config,
        context,
        honours=(*HONOURED, *MULTIPLIERS, *EXPERTS, *MAMBA, *UNREAD, *taken_for_granted(config, GRANTED)),
        kinds=tuple(attention if name in ATTENTION else recurrence for name in config.layer_types),
        ropes={ROPE: rope(config, context)} if turns else {},
        tensors=({f"shared_{role}": source for role, source in mlp.items()} if experts else mlp)
        | (expert_sources(experts, config.hidden_size) if experts else {})
        | (mamba_sources(mamba, config.hidden_size, "mamba.") if mamba else {}),
        ffn=ffn,
        mamba=mamba,
        experts=experts,
        **granite_options(config),
    )


def _mamba(config: Any) -> Mamba2:
    """Return the sizes of the Mamba-2 layers. Raises CheckpointError for what programs do not support."""
    if config.mamba_proj_bias:
        raise CheckpointError("mamba_proj_bias is true: programs have Mamba-2 without biases of its projections only")
    if activation(config, "hidden_act") != "silu":
        raise CheckpointError(f"hidden_act is {config.hidden_act!r}: programs have Mamba-2 with SiLU only")
    least, most = config.time_step_limit or (0.0, inf)
    if most != inf:
        raise CheckpointError(f"time_step_limit: {most} is an upper limit of steps, which programs do not have")
    return checked_mamba(
        Mamba2(
            heads=config.mamba_n_heads,
            groups=config.mamba_n_groups,
            head_dim=config.mamba_d_head,
            state_dim=config.mamba_d_state,
            taps=config.mamba_d_conv,
            conv_bias=bool(config.mamba_conv_bias),
            least_step=float(least),
        )
    )


def mamba_sources(mamba: Mamba2, hidden: int, path: str) -> dict[str, Sources]:
    """Return the sources of a Mamba-2 layer's constants, whose tensors' names begin with `path`."""
    ends = {"in_proj_z": mamba.width, "in_proj_xbc": mamba.width + mamba.mixed}
    rows = mamba.width + mamba.pending  # of the gate; of x, B and C; of steps
    firsts = zip((*ends, "in_proj_dt"), (0, *ends.values()), (*ends.values(), rows), strict=True)
    sources: dict[str, Sources] = {
        f"mamba.{role}.weight": TensorSource(f"{path}in_proj.weight", rows=(first, end, 1), shape=(rows, hidden))
        for role, first, end in firsts
    }
    sources |= {
        f"mamba.tap_{j}": TensorSource(f"{path}conv1d.weight", column=j, shape=(mamba.mixed, 1, mamba.taps))
        for j in range(mamba.taps)
    }
    sources |= {f"mamba.{name}": TensorSource(path + name) for name in ("dt_bias", "norm.weight", "out_proj.weight")}
    return sources | {
        "mamba.conv_bias": TensorSource(f"{path}conv1d.bias"),
        "mamba.rate": TensorSource(f"{path}A_log", exp=True, times=-1.0),
        "mamba.skip": TensorSource(f"{path}D", times=DECAY_SCALE),
    }
