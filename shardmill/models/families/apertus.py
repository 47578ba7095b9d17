"""model_type apertus: Apertus, by EPFL, ETH Zurich and CSCS. An MLP without a gate, whose activation is learned.

Source of the arithmetic: transformers, models/apertus/modeling_apertus.py, and XIELUActivation in activations.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import PREFIX, XIELU, ModelDescription, TensorSource
from shardmill.models.decoder import attention_biases, decoder, taken_for_granted

NORMS = {
    "input_layernorm.weight": TensorSource("attention_layernorm.weight"),
    "post_attention_layernorm.weight": TensorSource("feedforward_layernorm.weight"),
}
GRANTED = {"mlp_bias": False, "post_norm": False, "qk_norm": True}
FIXED = {"beta": 0.5, "eps": -1e-6}  # what every checkpoint holds beside the two learned numbers
ADDED = {"alpha_p": 0.0, "alpha_n": FIXED["beta"]}  # after softplus


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers ApertusConfig for programs of `context` slots."""
    if config.hidden_act != XIELU:
        raise CheckpointError(f"hidden_act {config.hidden_act!r}: {config.model_type} programs have {XIELU} only")
    path, width = "mlp.act_fn.", config.intermediate_size
    learned = {  # repeated for each channel, since coremltools keeps arrays of fewer than 10 numbers out of the file
        path + name: TensorSource(path + name, softplus=True, add=add, repeat=width, shape=(1,))
        for name, add in ADDED.items()
    }
    model = decoder(
        config,
        context,
        honours=("attention_bias", *taken_for_granted(config, GRANTED)),
        tensors=NORMS | learned,
        activation=XIELU,
        gated=False,
        qk_norm="before",
        **attention_biases(config),
    )
    layers = [f"{PREFIX}layers.{i}.{path}" for i in range(config.num_hidden_layers)]
    return replace(model, fixed={layer + name: value for layer in layers for name, value in FIXED.items()})
