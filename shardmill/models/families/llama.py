"""model_type llama: Llama 2 and 3, TinyLlama, SmolLM, SmolLM2, Falcon 3 and what was fine-tuned from them.

Source of the arithmetic: transformers, models/llama/modeling_llama.py.
"""

from __future__ import annotations

from typing import Any

from shardmill.models.architecture import ModelDescription
from shardmill.models.decoder import attention_biases, decoder, taken_for_granted

GRANTED = {"activation": "swiglu"}  # another name for what hidden_act says


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers LlamaConfig for programs of `context` slots."""
    return decoder(
        config,
        context,
        honours=("attention_bias", "mlp_bias", *taken_for_granted(config, GRANTED)),
        **attention_biases(config),
        mlp_bias=bool(config.mlp_bias),
    )
