"""model_type qwen3_5_moe_text: Qwen3.5 with experts in the place of the MLP, and an MLP with a gate beside them.

Source of the arithmetic: transformers, models/qwen3_5_moe/modeling_qwen3_5_moe.py. Qwen3.6 with experts has the same
model_type. In a published checkpoint all experts of a layer lie in two tensors; where transformers has saved it again,
each projection of each expert has a tensor.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import Experts, ModelDescription, Sources, TensorSource
from shardmill.models.experts import checked_experts, separate, stacked
from shardmill.models.families.qwen3_5_text import hybrid
from shardmill.models.families.qwen3_moe import NAMES

HONOURED = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size")
SHARED = {f"shared_mlp.{name}_proj.weight": f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")}
ROUTER, GATE = "mlp.gate.weight", "mlp.shared_expert_gate.weight"
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Qwen3_5MoeTextConfig for programs of `context` slots."""
    hidden, counts = config.hidden_size, (config.num_experts, config.num_experts_per_tok)
    experts = checked_experts(Experts(*counts, config.moe_intermediate_size, beside=True, beside_gate=True))
    beside: dict[str, Sources] = {role: TensorSource(name) for role, name in SHARED.items()}
    beside["mlp.router.weight"] = TensorSource(ROUTER, shape=(experts.count, hidden))
    beside["shared_mlp_gate.weight"] = TensorSource(GATE, shape=(1, hidden))
    each = [name.format(i) for name in NAMES.values() for i in range(experts.count)]
    return hybrid(
        config,
        context,
        honours=HONOURED,
        branch="experts",
        tensors=beside | stacked(experts, hidden, *STACKS),
        others=separate(experts, hidden, NAMES),
        drafting=(ROUTER, GATE, *SHARED.values(), *STACKS, *each),
        ffn=config.shared_expert_intermediate_size,
        experts=experts,
    )
