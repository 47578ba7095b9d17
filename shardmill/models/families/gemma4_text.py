"""model_type gemma4_text: Gemma 4, text only and dense. Gemma 3 with a row for each token and layer.

Values are normed and scores are not divided. Full layers have wider heads than sliding ones. The last layers may read
the caches of earlier layers, and full layers may use their keys as values.

Source of the arithmetic: transformers, models/gemma4/modeling_gemma4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import LOCAL_ROPE, PREFIX, ROPE, LayerSpec, ModelDescription, Rope, TensorSource
from shardmill.models.contract import PER_LAYER
from shardmill.models.decoder import activation, attention_biases, decoder, sliding_kind
from shardmill.models.rotary import FIXED, rope

HONOURED = (
    *("attention_bias", "attention_k_eq_v", "final_logit_softcapping", "global_head_dim", "hidden_activation"),
    *("hidden_size_per_layer_input", "layer_types", "num_global_key_value_heads", "num_kv_shared_layers"),
    *("per_layer_config", "sliding_window", "use_bidirectional_attention", "use_double_wide_mlp"),
    "vocab_size_per_layer_input",
)
TABLES = {"full_attention": ROPE, "sliding_attention": LOCAL_ROPE}
OWN = ("head_dim", "num_key_value_heads")  # what layers may differ in
UNREAD = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight")  # of layers that share


def describe(config: Any, context: int) -> ModelDescription:
    """Return the description of a transformers Gemma4TextConfig for programs of `context` slots."""
    check_layers(config)
    width = getattr(config, "hidden_size_per_layer_input", 0) or 0
    _refuse(config, width)
    model = layers(config, context)
    kinds = model.architecture.kinds
    unread = [f"{PREFIX}layers.{i}.self_attn.{name}" for i, kind in enumerate(kinds) if kind.shares for name in UNREAD]
    of_model = _of_model(config.vocab_size, len(kinds), width, config.hidden_size) if width else {}
    return replace(model, sources={**model.sources, **of_model}, ignored=(*model.ignored, *unread))


def layers(config: Any, context: int) -> ModelDescription:
    """Return the description of the layers alone; also of an assistant, all of whose layers share caches."""
    tables = rotary_tables(config, context)
    return decoder(
        config,
        context,
        honours=HONOURED,
        kinds=kinds_of(config, context, config.sliding_window, tables),
        ropes=tables,
        window=config.sliding_window,
        embedding_scale=sqrt(config.hidden_size),
        tensors=_tensors(config.hidden_size),
        logit_cap=config.final_logit_softcapping or 0.0,
        **layer_options(config),
    )


def check_layers(config: Any) -> None:
    """Raise CheckpointError for a type of layer that programs lack, or if layers differ in more than their heads."""
    if unknown := sorted(set(config.layer_types) - TABLES.keys()):
        raise CheckpointError(f"layer_types: {unknown[0]!r}: programs have {' and '.join(TABLES)} only")
    by_layer = config.to_dict().get("per_layer_config") or {}
    if others := sorted({name for layer in by_layer.values() for name in layer} - {*OWN}):
        raise CheckpointError(f"per_layer_config: {others[0]}: layers may differ in {' and '.join(OWN)} only")


def rotary_tables(config: Any, context: int) -> dict[str, Rope]:
    """Return the rotary table of each type of layer, by the table's name."""
    types = sorted(set(config.layer_types))
    return {TABLES[name]: rope(config, context, name, (*FIXED, "proportional")) for name in types}


def kinds_of(config: Any, context: int, window: int, tables: Mapping[str, Rope]) -> list[LayerSpec]:
    """Return the kinds of the layers, in order; a sliding layer sees `window` positions."""
    return [_kind(config, i, context, window, tables) for i in range(config.num_hidden_layers)]


def layer_options(config: Any) -> dict[str, Any]:
    """Return the options of the Graph that decide the layers' arithmetic."""
    widest = max(config.per_layer_config, key=lambda layer: layer.head_dim)
    return {
        "head_dim": widest.head_dim,
        "kv_heads": widest.num_key_value_heads,
        "activation": activation(config, "hidden_activation"),
        "attention_scale": 1.0,
        "qk_norm": "before",
        "value_norm": True,
        "post_norms": True,
        "per_layer": getattr(config, "hidden_size_per_layer_input", 0) or 0,
        # The model divides the projection by sqrt(hidden_size).
        "per_layer_eps": config.rms_norm_eps * config.hidden_size,
        "layer_scale": True,
        **attention_biases(config),
    }


def _refuse(config: Any, width: int) -> None:
    """Raise CheckpointError for what the programs lack."""
    if getattr(config, "enable_moe_block", False):
        raise CheckpointError("enable_moe_block is true: programs have no experts beside an MLP")
    if config.use_bidirectional_attention == "all":
        raise CheckpointError("use_bidirectional_attention is 'all': a decoder's tokens see only what is before them")
    if width and config.vocab_size_per_layer_input != config.vocab_size:
        tokens = f"{config.vocab_size_per_layer_input} tokens, the vocabulary has {config.vocab_size}"
        raise CheckpointError(f"vocab_size_per_layer_input: the second table has {tokens}")
    shared = getattr(config, "num_kv_shared_layers", 0)
    if shared and not width:
        raise CheckpointError("hidden_size_per_layer_input is 0: transformers can't run layers that share caches so")
    first = config.num_hidden_layers - shared
    if shared and not set(config.layer_types[first:]) <= set(config.layer_types[: max(first, 0)]):
        raise CheckpointError(f"num_kv_shared_layers is {shared}: no earlier layer has the cache that a layer shares")


def _kind(config: Any, index: int, context: int, window: int, tables: Mapping[str, Rope]) -> LayerSpec:
    """Return the kind of a layer."""
    name, layer_config = config.layer_types[index], config.per_layer_config[index]
    slides = name == "sliding_attention"
    shares = index >= config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    return sliding_kind(
        context,
        window if slides else None,
        rope=TABLES[name],
        head_dim=layer_config.head_dim,
        kv_heads=layer_config.num_key_value_heads,
        rope_dim=tables[TABLES[name]].dim,
        wide=2 if shares and getattr(config, "use_double_wide_mlp", False) else 1,
        key_is_value=bool(getattr(config, "attention_k_eq_v", False)) and not slides,
        shares=shares,
    )


def _tensors(hidden: int) -> dict[str, TensorSource]:
    """Return the tensors of a layer whose names differ from the names of the program's constants."""
    return {
        "layer_scale": layer_scalar(hidden),
        "per_layer.gate.weight": TensorSource("per_layer_input_gate.weight"),
        "per_layer.projection.weight": TensorSource("per_layer_projection.weight"),
        "per_layer.norm.weight": TensorSource("post_per_layer_input_norm.weight"),
    }


def _of_model(vocab: int, layers: int, width: int, hidden: int) -> dict[str, TensorSource]:
    """Return the sources of the second table, and of the constants that are pieces of a tensor for all layers."""
    table = TensorSource(f"{PREFIX}embed_tokens_per_layer.weight", times=sqrt(width), shape=(vocab, layers * width))
    return {PER_LAYER: table, **projected_rows(PREFIX, layers, width, hidden)}


def layer_scalar(hidden: int) -> TensorSource:
    """Return the source of the vector of equal numbers that the stream is multiplied by after a layer."""
    return TensorSource("layer_scalar", repeat=hidden, shape=(1,))


def projected_rows(prefix: str, layers: int, width: int, hidden: int) -> dict[str, TensorSource]:
    """Return the sources of the layers' constants that are pieces of a tensor for all layers, or such a tensor.

    Args:
        prefix: begins the tensors' names.
        layers: how many layers there are.
        width: of a token's row for a layer.
        hidden: width of the residual stream.
    """
    norm, matrix = (f"{prefix}per_layer_{name}.weight" for name in ("projection_norm", "model_projection"))
    sources: dict[str, TensorSource] = {}
    for i in range(layers):
        rows, path = (i * width, (i + 1) * width, 1), f"layers.{i}.per_layer."
        sources[f"{path}model_projection.weight"] = TensorSource(matrix, rows=rows, shape=(layers * width, hidden))
        sources[f"{path}projection_norm.weight"] = TensorSource(norm)
    return sources
