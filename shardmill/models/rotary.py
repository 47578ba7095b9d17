"""Takes a model's rotary tables from transformers' own modules, so that every variant matches transformers."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib import import_module
from math import isfinite
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import Rope
from shardmill.printable import first_line

SCALED = ("linear", "dynamic", "llama3", "yarn", "longrope")
FIXED = ("default", "linear", "llama3", "yarn")  # types whose frequencies do not depend on the length


def rope(config: Any, context: int, layer_type: str = "", fixed: tuple[str, ...] = FIXED) -> Rope:
    """Return frequencies and attention factor as transformers computes them for a sequence of `context` tokens.

    Args:
        config: transformers' config of the model.
        context: the length, which decides LongRoPE's factors.
        layer_type: the layer type of the table, in a model with a separate table for each layer type.
        fixed: rope types whose frequencies the family's own module computes once and for all.

    Raises:
        CheckpointError: if transformers makes no table of finite numbers from the parameters.
    """
    try:
        frequencies = _rope(config, context, layer_type, fixed)
        if not all(isfinite(number) for number in (*frequencies.inv_freq, frequencies.scale)):
            raise ValueError("some frequencies are not finite")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"rope_parameters: no rotary table can be made of them: {first_line(error)}") from error
    return frequencies


def refuse_partial_rotation(config: Any, honours: Collection[str]) -> None:
    """Raise CheckpointError where transformers makes a table of part of each head for a family that turns whole heads.

    Only functions of scaled types read partial_rotary_factor for every family. The products then fail in transformers.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    for table in tables:
        share, kind = table.get("partial_rotary_factor", 1.0), table.get("rope_type")
        if share != 1 and kind in SCALED and "partial_rotary_factor" not in honours:
            raise CheckpointError(
                f"rope_parameters: partial_rotary_factor is {share} beside rope_type {kind!r}: transformers can't run "
                f"that for {config.model_type}, which turns whole heads; take one of the two out"
            )


def _rope(config: Any, context: int, layer_type: str, fixed: tuple[str, ...]) -> Rope:
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    kind = parameters["rope_type"]
    share = parameters.get("partial_rotary_factor", 1.0)
    if not 0 < share <= 1:  # transformers makes a table of any length
        raise ValueError(f"partial_rotary_factor is {share}: it must be over 0 and at most 1")
    if kind == "longrope":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, seq_len=context)
        long = context > parameters["original_max_position_embeddings"]
        return Rope(tuple(inv_freq.tolist()), float(scale), "long" if long else "short")
    if kind not in fixed:
        raise ValueError(f"rope_type {kind!r} is not supported; supported: {', '.join((*fixed, 'longrope'))}")
    module = _rotary_class(config)(config)
    prefix = f"{layer_type}_" if layer_type else ""
    inv_freq = getattr(module, f"{prefix}inv_freq")
    return Rope(tuple(inv_freq.tolist()), float(getattr(module, f"{prefix}attention_scaling")), "default")


def _rotary_class(config: Any) -> Any:
    """Return the RotaryEmbedding of the module that belongs to a config's class."""
    module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    members = inspect.getmembers(module, inspect.isclass)
    return next(member for name, member in members if name.endswith("RotaryEmbedding"))
