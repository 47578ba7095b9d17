"""Qwen3.5's MTP layer as data: one more layer in the model's checkpoint, which predicts a further token.

At position p the layer gets the model's last hidden state h_p and the embedding of the token t_(p+1). It predicts
t_(p+2):

    y = fc [pre_fc_norm_embedding(embedding of t_(p+1)); pre_fc_norm_hidden(h_p)]
    z = a layer of full attention like the model's, with separate keys and values
    logits = lm_head(norm(z))

h_p is normed by the model's last norm. In a draft's further steps norm(z) of the position before stands in its place.
Embedding and LM head are the model's. Every gain is 1 + weight, as the model's are.

Sources:

- vLLM, vllm/model_executor/models/qwen3_5_mtp.py at 01d9980: the arithmetic, and the names of tensors. transformers
  does not read them.
- LightLLM, pull request 1402: on Qwen3.5-0.8B more drafts are accepted if h_p is read after the model's last norm.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import replace
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models import family
from shardmill.models.architecture import PREFIX, Architecture, ModelDescription, Sources, TensorSource, all_renamed
from shardmill.models.eagle3 import DrafterDescription
from shardmill.models.interface import MTP

FAMILY = "qwen3_5_text"  # also of the text tower of a qwen3_5
BEFORE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
NORMS = ("norm", *BEFORE)


def describe(
    config: Any,
    tensors: Collection[str] | None,
    target: Architecture,
    context: int,
    prefix: str = PREFIX,
    vocab: int | None = None,
) -> DrafterDescription:
    """Return the description of a model's MTP layer.

    Args:
        config: transformers' config of the model.
        tensors: the names of the checkpoint's tensors; None if only its config is there yet.
        target: the model.
        context: key/value slots of the programs.
        prefix: begins the checkpoint's names of the model where transformers' begin with "model.".
        vocab: how many tokens it drafts, the first ones of the model; None for all.

    Raises:
        CheckpointError: the model has no such layer, or one that programs can't honour.
    """
    if config.model_type != FAMILY:
        raise CheckpointError(
            f"drafter: mtp: of a Qwen3.5 without experts only, and this is a {config.model_type}; leave out `drafter`"
        )
    layers = getattr(config, "mtp_num_hidden_layers", None) or 0
    if layers != 1:
        raise CheckpointError(f"drafter: mtp_num_hidden_layers is {layers}: one layer can draft; leave out `drafter`")
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise CheckpointError("drafter: mtp_use_dedicated_embeddings is True: the host has the model's embedding only")
    if tensors is not None and f"{MTP}.fc.weight" not in tensors:
        raise CheckpointError("drafter: the checkpoint has no tensors mtp.*; take one that has, or leave out `drafter`")
    if vocab and vocab > target.vocab:
        raise CheckpointError(f"head.draft_vocab_size: {vocab} is over the model's {target.vocab} tokens")
    layer_config = copy(config)
    layer_config.num_hidden_layers, layer_config.layer_types = 1, ["full_attention"]
    described = family(FAMILY).describe(layer_config, context)
    names = {"model.layers.0.": f"{MTP}.layers.0.", "model.norm.": f"{MTP}.norm."}

    def moved(name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name)

    scales = {name: target.graph.stream_scale for name in BEFORE}  # fc writes to the stream
    sources: dict[str, Sources] = {
        f"{name}.weight": TensorSource(f"{MTP}.{name}.weight", add=1.0, times=scales.get(name, 1.0)) for name in NORMS
    }
    sources["fc.weight"] = TensorSource(f"{MTP}.fc.weight")
    for path, each in described.sources.items():
        sources[path] = all_renamed(each, moved)
    if vocab:  # the tensor has the other rows too
        head = sources["lm_head.weight"]
        assert isinstance(head, TensorSource)
        sources["lm_head.weight"] = replace(head, shape=(target.vocab, target.graph.hidden))
    graph = replace(described.architecture.graph, activation=target.graph.activation)
    architecture = replace(described.architecture, model_type=MTP, graph=graph, vocab=vocab or target.vocab)
    model = ModelDescription(architecture, sources).under(prefix)
    return DrafterDescription(model, (target.layers,), False, MTP, first=(MTP, graph.hidden))
