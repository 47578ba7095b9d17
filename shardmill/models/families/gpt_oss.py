"""model_type gpt_oss: OpenAI's gpt-oss. Sinks, sliding layers in turn, clamped experts stored transposed.

Source of the arithmetic: transformers, models/gpt_oss/modeling_gpt_oss.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import Experts, ModelDescription, Sources, TensorSource
from shardmill.models.decoder import attention_biases, decoder, kinds_by_type, taken_for_granted
from shardmill.models.experts import checked_experts, transposed

HONOURED = (
    "attention_bias",
    "layer_types",
    "num_experts_per_tok",
    "num_local_experts",
    "sliding_window",
    "swiglu_alpha",
    "swiglu_limit",
)
UNREAD = ("initial_context_length",)  # by transformers, which has the original length in rope_parameters


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers GptOssConfig for programs of `context` slots."""
    window = config.sliding_window
    experts = gpt_oss_experts(config)
    granted = taken_for_granted(config, {"experts_per_token": experts.chosen})  # said twice on the hub
    tensors: dict[str, Sources] = {
        "mlp.router.weight": TensorSource("mlp.router.weight", shape=(experts.count, config.hidden_size)),
        **transposed(experts, config.hidden_size, "mlp.experts.", interleaved=True),
    }
    return decoder(
        config,
        context,
        honours=(*HONOURED, *UNREAD, *granted),
        kinds=kinds_by_type(config.layer_types, context, window, ffn="experts"),
        window=window,
        tensors=tensors,
        **attention_biases(config),
        sinks=True,
        experts=experts,
    )


def gpt_oss_experts(config: Any) -> Experts:
    """Return the experts of a config that names them as gpt_oss does."""
    return checked_experts(
        Experts(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            router_bias=True,
            biases=True,
            swiglu_alpha=config.swiglu_alpha,
            swiglu_limit=config.swiglu_limit,
        )
    )
