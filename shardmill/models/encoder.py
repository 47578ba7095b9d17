"""Describes an encoder from its transformers config for encoder files; refuses fields that programs can't honour."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import (
    CLASSIFY,
    EMBED,
    LABEL,
    RANK,
    Architecture,
    EncoderIO,
    Graph,
    LayerSpec,
    ModelDescription,
    Sources,
    TensorSource,
    blocks,
    renamed,
)
from shardmill.models.decoder import check_heads, refuse_unplaced
from shardmill.models.part_kinds import model_constants, whole_spec

TASKS = {"ForTokenClassification": LABEL, "ForSequenceClassification": CLASSIFY, "Model": EMBED}
TEXT_TASKS = {"ForCausalLM": EMBED, "Model": EMBED}  # of language models, whose last hidden states are pooled
HEAD = "lm_head.weight"
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"} | {
    name: name for name in ("relu", "tanh")
}


@dataclass(frozen=True)
class Names:
    """The names of a checkpoint's tensors.

    Attributes:
        layer: the beginning of the names of a layer's tensors, with "{i}" for its index.
        roles: for each of a layer's constants, by the module's name in the checkpoint ("self_attn.q_proj" and its
            like, without ".weight" and ".bias").
        around: as `roles`, for constants outside the layers; for tables, the tensor's whole name.
        ignored: tensors that a checkpoint may hold and no program needs.
    """

    layer: str
    roles: Mapping[str, str]
    around: Mapping[str, str]
    ignored: Collection[str] = field(default=())


def task_of(config: Any, tasks: Mapping[str, str] = TASKS) -> str:
    """Return the task of the checkpoint, by config.json's architectures.

    Args:
        config: transformers' config.
        tasks: the family's tasks by the end of the architecture's name.

    Raises:
        CheckpointError: for any other task.
    """
    named = (config.architectures or [""])[0]
    named_tasks = [task for suffix, task in tasks.items() if named.endswith(suffix)]
    if not named_tasks:
        raise CheckpointError(f"architectures: {named!r}: programs have *{', *'.join(tasks)} only")
    return named_tasks[0]


def _check_problem(config: Any, task: str) -> None:
    """Raise CheckpointError if a text may have several labels, or if labels are numbers."""
    kind = getattr(config, "problem_type", None)
    if task == CLASSIFY and (kind not in (None, "single_label_classification") or config.num_labels == 1):
        problem = f"problem_type is {kind!r} with {config.num_labels} labels"
        raise CheckpointError(f"{problem}: programs give a text one label of several")


def _labels_of(config: Any, task: str) -> tuple[str, ...]:
    """Return the names of the labels by row; empty if hidden states come out."""
    if task == EMBED:
        return ()
    named = {int(row): str(name) for row, name in (config.id2label or {}).items()}
    if sorted(named) != list(range(len(named))) or not named:
        raise CheckpointError("id2label: is no list of labels from 0 on")
    return tuple(named[row] for row in range(len(named)))


def encoder(
    config: Any,
    length: int,
    honours: Collection[str],
    names: Names,
    graph: Graph,
    ends: EncoderIO,
    *,
    kinds: Sequence[LayerSpec],
    ropes: Mapping[str, Any],
    band: int | None = None,
    positions: int = 0,
    types: int = 0,
    tensors: Mapping[str, Sources] | None = None,
    task: str = "",
    embedding_scale: float = 1.0,
    tied: bool = False,
    causal: bool = False,
    template: str = "",
    instruction: str = "",
) -> ModelDescription:
    """Return the description of an encoder that consists of the layers in models/blocks.py.

    Args:
        config: transformers' config.
        length: the most tokens of a pass.
        honours: fields of the config that the family reads beside the fields that all families read.
        names: the names of the checkpoint's tensors.
        graph: the options of the layers.
        ends: the options before and after the layers; the number of labels is filled in here.
        kinds: the layers, in order.
        ropes: rotary tables by name.
        band: positions that a token of a sliding layer sees on either side.
        positions: rows of the table of positions.
        types: rows of the table of segments.
        tensors: the sources of a layer's constants by role, if not the tensor of that name. Their names lack the
            beginning that a layer's tensors share. The source of a constant outside the layers only says what is done
            with its tensor.
        task: the task, if it is not the task of config.json's architectures.
        embedding_scale: the model's factor for a token's row of the embedding.
        tied: whether the embedding table is the LM head, which only a model that ranks has.
        causal: whether tokens see no later token.
        template: how a model that ranks is asked, with {instruction}, {query} and {document}; "" if the family ranks
            nothing.
        instruction: the instruction of a request that has none.

    Raises:
        CheckpointError: if the config has a setting that the programs can't honour.
    """
    refuse_unplaced(config, honours)
    limit = config.max_position_embeddings
    if length > limit:
        raise CheckpointError(f"buckets: {length} is over the model's {limit} positions; give smaller ones")
    for kind in dict.fromkeys(kinds):
        check_heads(graph.of(kind))
    task = task or task_of(config)
    _check_problem(config, task)
    labels = _labels_of(config, task)
    a = Architecture(
        model_type=config.model_type,
        graph=graph,
        kinds=tuple(kinds),
        vocab=config.vocab_size,
        tied=tied,
        ropes=dict(ropes),
        task=task,
        ends=replace(ends, labels=len(labels)),
        band=band,
        labels=labels,
        positions=positions,
        types=types,
        embedding_scale=embedding_scale * graph.stream_scale,
        causal=causal,
        template=template,
        instruction=instruction,
    )
    sources = {path: _source(path, shape, names, tensors or {}, labels) for path, shape in model_constants(a).items()}
    sources["embedding"] = TensorSource(_tensor("embedding", names), times=a.embedding_scale)
    return ModelDescription(a, sources, ignored=tuple(names.ignored))


def with_answers(
    model: ModelDescription, answers: Sequence[str], tokens: Sequence[int] | None = None
) -> ModelDescription:
    """Return a language model that chooses between answers, with the rows of its LM head for these answers.

    Args:
        model: the model as an encoder that gives hidden states.
        answers: the answers.
        tokens: the token of each answer; None if there is no tokenizer yet, and only shapes count.

    Raises:
        CheckpointError: if the family ranks nothing.
    """
    a = model.architecture
    if not a.template or a.ends is None:
        raise CheckpointError(f"answers: {a.model_type} models rank nothing; leave `answers` out of the config")
    ends = replace(a.ends, labels=len(answers), label_bias=False)
    a = replace(a, task=RANK, labels=tuple(answers), ends=ends)
    head = blocks(model.sources["embedding"])[0].tensor if a.tied else HEAD
    chosen = islice(cycle(range(len(answers)) if tokens is None else tokens), whole_spec(a).label_rows)
    rows = tuple(TensorSource(head, rows=(row, row + 1, 1), shape=(a.vocab, a.graph.hidden)) for row in chosen)
    ignored = model.ignored if a.tied else tuple(name for name in model.ignored if name != HEAD)
    return replace(model, architecture=a, sources={**model.sources, "classifier.weight": rows}, ignored=ignored)


def _source(
    path: str, shape: tuple[int, ...], names: Names, tensors: Mapping[str, Sources], labels: Sequence[str]
) -> Sources:
    """Return the source of a constant."""
    if path.startswith("classifier."):
        return _filled_up(_tensor(path, names), shape, len(labels))
    if path in tensors:
        return tuple(replace(source, tensor=_tensor(path, names)) for source in blocks(tensors[path]))
    index, _, role = path.removeprefix("layers.").partition(".")
    if not path.startswith("layers.") or role not in tensors:
        return TensorSource(_tensor(path, names))
    layer = names.layer.format(i=index)
    sources = tuple(renamed(source, lambda name: layer + name) for source in blocks(tensors[role]))
    return sources[0] if len(sources) == 1 else sources


def _filled_up(tensor: str, shape: tuple[int, ...], labels: int) -> Sources:
    """Return a classifier's rows, followed by the first rows again up to the program's number of rows."""
    whole = TensorSource(tensor, shape=(labels, *shape[1:]))
    times, rest = divmod(shape[0], labels)
    rows = (whole,) * times + ((replace(whole, rows=(0, rest, 1)),) if rest else ())
    return rows[0] if len(rows) == 1 else rows


def _tensor(path: str, names: Names) -> str:
    """Return the checkpoint's name of a constant."""
    if path in names.around:
        return names.around[path]
    if path.startswith("layers."):
        _, index, role = path.split(".", 2)
        module, _, last = role.rpartition(".")
        return f"{names.layer.format(i=index)}{names.roles.get(module, module)}.{last}"
    module, _, last = path.rpartition(".")
    return f"{names.around[module]}.{last}"


def encoder_activation(config: Any, name: str) -> str:
    """Return the activation that a field of the config names. Raises CheckpointError for one that programs lack."""
    activation = getattr(config, name)
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"{name} {activation!r}: programs have {', '.join(sorted(ACTIVATIONS))} only")
    return ACTIVATIONS[activation]
