"""Describes a decoder from its transformers config for the family files; refuses fields that programs can't honour."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import (
    MASK,
    PREFIX,
    ROPE,
    SLIDING_MASK,
    Architecture,
    Graph,
    LayerSpec,
    ModelDescription,
    Sources,
    TensorSource,
    all_renamed,
)
from shardmill.models.layer_constants import layer_constants
from shardmill.models.rotary import refuse_partial_rotation, rope

# Fields that every family reads, here or through transformers' rotary module.
READ = {
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
}
# Fields that do not change what a trained model computes: training, generation, bookkeeping.
IDLE = {
    "architectures",
    "auto_map",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "is_llama_config",  # nanotron's, in SmolLM2
    "keys_to_ignore_at_inference",
    "label2id",
    "max_sequence_length",
    "model_max_length",
    "name_or_path",
    "neftune_noise_alpha",
    "original_max_position_embeddings",  # LongRoPE's, read with rope_parameters
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_router_logits",
    "pretraining_tp",  # splits products into sums: the same arithmetic
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "rope_scaling",  # folded into rope_parameters by transformers
    "rope_theta",
    "router_aux_loss_coef",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
}
BEGINNINGS, ENDINGS = ("_", "unsloth"), ("_token_id", "dropout", "dropout_prob")  # of further names of idle fields
NEUTRAL: tuple[Any, ...] = (None, False, 0, 0.0, 1.0, "", [], {}, ())
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}


def decoder(
    config: Any,
    context: int,
    honours: Collection[str] = (),
    *,
    kinds: Sequence[LayerSpec] | None = None,
    ropes: Mapping[str, Any] | None = None,
    window: int | None = None,
    embedding_scale: float = 1.0,
    tensors: Mapping[str, Sources] | None = None,
    final_norm: str = "norm.weight",
    table: TensorSource | None = None,
    others: Mapping[str, Sources] | None = None,
    **options: Any,
) -> ModelDescription:
    """Return the description of a decoder that consists of the layers in models/blocks.py.

    Args:
        config: transformers' config.
        context: key/value slots of the programs.
        honours: fields of the config that the family reads beside the fields that all families read.
        kinds: the layers, in order; if left out, every layer is a plain attention layer.
        ropes: rotary tables by name, none if no layer turns; if left out, the config's only table.
        window: positions that a sliding layer sees.
        embedding_scale: the model's factor for a token's row of the embedding.
        tensors: the sources of a layer's constants by role, if not the tensor of the same name.
        final_norm: the last norm's tensor.
        table: the source of the embedding before all multipliers, if not embed_tokens alone.
        others: the sources of a layer's constants by role in a second layout that checkpoints have.
        options: the options of the Graph.

    Raises:
        CheckpointError: if the config has a setting that the programs can't honour.
    """
    refuse_unplaced(config, honours)
    refuse_partial_rotation(config, honours)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise CheckpointError(f"context {context} is over the model's {limit} positions; lower context in the config")
    tables = dict(ropes) if ropes is not None else {ROPE: rope(config, context)}
    graph = graph_of(config, tables, **options)
    layers = tuple(kinds) if kinds is not None else (LayerSpec(),) * config.num_hidden_layers
    for kind in dict.fromkeys(layers):
        check_heads(graph.of(kind))
    architecture = Architecture(
        model_type=config.model_type,
        graph=graph,
        kinds=layers,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        ropes=tables,
        embedding_scale=embedding_scale * graph.stream_scale,
        window=window if any(kind.mask == SLIDING_MASK for kind in layers) else None,
    )
    named = tensors or {}
    sources = _layer_sources(architecture, named) | _end_sources(architecture, named, final_norm, table)
    ignored = ("lm_head.weight",) if architecture.tied else ()
    second = {
        f"layers.{i}.{role}": _placed(each, f"{PREFIX}layers.{i}.")
        for i in range(architecture.layers)
        for role, each in (others or {}).items()
    }
    return ModelDescription(architecture, sources, ignored=ignored, others=second)


def graph_of(
    config: Any,
    tables: Mapping[str, Any],
    *,
    ffn: int | None = None,
    rms_norm_eps: float | None = None,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    **options: Any,
) -> Graph:
    """Return the options of the programs' graph; options that a family leaves out come from the config.

    Args:
        config: transformers' config.
        tables: the rotary tables by name.
        ffn: width of the MLP.
        rms_norm_eps: epsilon of the norms.
        head_dim: width of a head.
        kv_heads: heads of keys and values.
        options: further fields of Graph.
    """
    return Graph(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=kv_heads or getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rope_dim=max((table.dim for table in tables.values()), default=0),
        ffn=ffn or config.intermediate_size,
        rms_norm_eps=rms_norm_eps or config.rms_norm_eps,
        activation=options.pop("activation", None) or activation(config, "hidden_act"),
        **options,
    )


def _layer_sources(architecture: Architecture, named: Mapping[str, Sources]) -> dict[str, Sources]:
    """Return the source of each constant of each layer: the one in `named` for its role, or the tensor of its name."""
    return {
        f"layers.{i}.{role}": _placed(named.get(role, TensorSource(role)), f"{PREFIX}layers.{i}.")
        for i, kind in enumerate(architecture.kinds)
        for role in layer_constants(architecture.graph, kind)
    }


def _placed(sources: Sources, prefix: str) -> Sources:
    """Return the sources with a prefix before each tensor's name."""
    return all_renamed(sources, lambda name: prefix + name)


def _end_sources(
    architecture: Architecture, named: Mapping[str, Sources], final_norm: str, table: TensorSource | None
) -> dict[str, Sources]:
    """Return the sources of the constants outside the layers: the last norm, the embedding and the LM head."""
    embedding = table or TensorSource("embed_tokens.weight")
    sources: dict[str, Sources] = {
        "norm.weight": _placed(named.get("norm.weight", TensorSource(final_norm)), PREFIX),
        "embedding": _placed(replace(embedding, times=architecture.embedding_scale), PREFIX),
        "lm_head.weight": TensorSource(PREFIX + embedding.tensor if architecture.tied else "lm_head.weight"),
    }
    if architecture.graph.norm == "layer" and architecture.graph.norm_bias:
        sources["norm.bias"] = _placed(TensorSource("norm.bias"), PREFIX)
    if architecture.graph.head_bias:
        sources["lm_head.bias"] = TensorSource("lm_head.bias")
    return sources


def activation(config: Any, field: str) -> str:
    """Return the activation that a field of the config names. Raises CheckpointError for one that programs lack."""
    name = getattr(config, field)
    if name not in ACTIVATIONS:
        raise CheckpointError(f"{field} {name!r}: programs have {', '.join(sorted(ACTIVATIONS))} only")
    return ACTIVATIONS[name]


def sliding_kind(context: int, window: int | None, **options: Any) -> LayerSpec:
    """Return a layer that sees `window` positions; it is a plain layer if the context holds no more positions.

    Raises CheckpointError for a window without a position.
    """
    if window is not None and window < 1:
        raise CheckpointError(f"sliding_window is {window}: no token would see any; write null if there is no window")
    return LayerSpec(mask=SLIDING_MASK if window and window < context else MASK, **options)


def kinds_by_type(
    layer_types: Sequence[str],
    context: int,
    window: int | None,
    sliding_rope: str = ROPE,
    full_rope: str | None = ROPE,
    **options: Any,
) -> tuple[LayerSpec, ...]:
    """Return attention layers after the config's `layer_types`.

    Raises CheckpointError for a type that programs lack.
    """
    slides = "sliding_attention" in layer_types
    known = {
        "full_attention": LayerSpec(rope=full_rope, **options),
        "sliding_attention": sliding_kind(context, window if slides else None, rope=sliding_rope, **options),
    }
    unknown = sorted(set(layer_types) - known.keys())
    if unknown:
        raise CheckpointError(f"layer_types: {unknown[0]!r}: programs have {' and '.join(known)} only")
    return tuple(known[name] for name in layer_types)


def refuse_unplaced(config: Any, honours: Collection[str]) -> None:
    """Raise CheckpointError for a field that nothing here reads and that is not at its neutral value."""
    placed = {*READ, *IDLE, *honours}
    for field, value in sorted(config.to_dict().items()):
        idle = field in placed or field.startswith(BEGINNINGS) or field.endswith(ENDINGS)
        if idle or is_neutral(value) or (field == "layer_types" and {*value} == {"full_attention"}):
            continue
        raise CheckpointError(f"config.json: {field} is {value!r}: {config.model_type} programs have no place for it")


def taken_for_granted(config: Any, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of fields that configs on the hub hold and transformers does not read.

    Args:
        config: transformers' config.
        values: for each of these fields, the value with which it says what transformers computes anyway.

    Raises:
        CheckpointError: if a field of the config has another value.
    """
    for field, value in values.items():
        if getattr(config, field, value) != value:
            said = f"{field} is {getattr(config, field)!r}"
            raise CheckpointError(f"config.json: {said}: transformers computes a {config.model_type} with {value!r}")
    return tuple(values)


def is_neutral(value: Any) -> bool:
    """Return whether a field at this value changes nothing, whatever it means. True is no number here."""
    return value is not True and value in NEUTRAL


def attention_biases(config: Any) -> dict[str, Any]:
    """Return the options for `decoder` of a family whose `attention_bias` decides on the biases of all projections."""
    bias = bool(config.attention_bias)
    return {"qkv_bias": bias, "o_bias": bias}


def pairs_turned(config: Any, turning: int, bias: bool) -> dict[str, Sources]:
    """Return the tensors of query and key, for `decoder`, of a family whose rotation turns neighbouring numbers.

    Args:
        config: transformers' config.
        turning: dimensions of each head that turn, the first ones.
        bias: whether the two projections have biases.
    """
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    return {
        f"self_attn.{role}.{name}": halved(f"self_attn.{role}.{name}", heads, width, turning)
        for role, heads in (("q_proj", config.num_attention_heads), ("k_proj", kv_heads))
        for name in (("weight", "bias") if bias else ("weight",))
    }


def halved(tensor: str, heads: int, width: int, turning: int) -> tuple[TensorSource, ...]:
    """Return each head's rows with the even rows first: the rotation turns halves, where the model turns neighbours.

    Scores are sums over a head's rows, so the order changes nothing else. The rows that do not turn follow as they are.
    """
    ranges = [
        rows
        for first in range(0, heads * width, width)
        for rows in (
            (first, first + turning, 2),
            (first + 1, first + turning, 2),
            (first + turning, first + width, 1),
        )
    ]
    return tuple(TensorSource(tensor, rows=rows) for rows in ranges if rows[0] < rows[1])


def row_halves(tensor: str, rows: int, columns: int) -> dict[str, TensorSource]:
    """Return the tensors of an MLP, for `decoder`, whose gate and up are the first and last `rows` rows of a tensor."""
    return {
        f"mlp.{role}_proj.weight": TensorSource(tensor, rows=(first, first + rows, 1), shape=(2 * rows, columns))
        for role, first in (("gate", 0), ("up", rows))
    }


def check_heads(g: Graph) -> None:
    """Raise CheckpointError for sizes of heads that do not fit each other."""
    if g.rope_dim > g.head_dim:
        raise CheckpointError(f"rope_parameters: turn {g.rope_dim} dimensions of heads that have {g.head_dim}")
    if g.heads % g.kv_heads:
        raise CheckpointError(f"{g.heads} heads are no multiple of {g.kv_heads} key/value heads")
