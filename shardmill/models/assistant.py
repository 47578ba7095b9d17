"""Gemma 4's assistant as data: a small Gemma 4 that drafts. It has no keys and values, and reads the model's caches.

A draft follows the model's newest token t at position p, which the model has not read yet. With the model's last hidden
state h at position p - 1:

    z = pre_projection [embedding of t; norm of h by the model's last norm]
    z = the layers, each of which reads the cache of the model's last layer of its type that has one
    logits = lm_head(norm(z))

For a further token of the draft, t is the token drafted last, and post_projection(norm(z)) stands in place of the
normed h. Position and caches stay the same: every step asks at position p and sees the positions before p. The
embedding, its scale included, is the model's. Logits have no cap.

Some checkpoints hold a second way to the logits, centroids of tokens (`use_ordered_embeddings`): transformers computes
the logits of the likeliest clusters only. Here all logits are computed, so that nothing is looked up by an index.

Sources:

- transformers 5.23.0, models/gemma4_assistant/modeling_gemma4_assistant.py: the model.
- transformers 5.23.0, generation/candidate_generator.py, SinglePositionMultiTokenCandidateGenerator: the steps. It lets
  a draft see position p, whose slot holds a rejected token of the draft before; here a draft does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models import family
from shardmill.models.architecture import Architecture, LayerSpec, ModelDescription, Sources, TensorSource, renamed
from shardmill.models.eagle3 import FOLDER, DrafterDescription
from shardmill.models.interface import ASSISTANT

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
PROJECTIONS = ("pre_projection.weight", "post_projection.weight")
UNUSED = ("lm_head.weight", "masked_embedding.centroids.weight", "masked_embedding.token_ordering")


def describe(config: Any, width: int | None, target: Architecture, context: int) -> DrafterDescription:
    """Return the description of an assistant for a model.

    Args:
        config: transformers' config of the assistant's layers, a Gemma 4's.
        width: hidden_size of its model.
        target: its model.
        context: key/value slots of the programs.

    Raises:
        CheckpointError: it is another model's assistant.
    """
    for what, ours, theirs in (
        ("backbone_hidden_size", width, target.graph.hidden),
        ("vocab_size", config.vocab_size, target.vocab),
        ("rms_norm_eps", config.rms_norm_eps, target.graph.rms_norm_eps),  # of both norms in one program
        ("sliding_window", config.sliding_window if target.window else None, target.window),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"drafter: its {what} is {ours}, the model's {theirs}: it is another model's assistant"
            )
    described = family("gemma4_text").layers(config, context)
    first, lenders = target.layers, [_lender(target, i, kind) for i, kind in enumerate(described.architecture.kinds)]
    kinds = tuple(replace(target.kinds[lender], shares=True, wide=1) for lender in lenders)
    graph = replace(described.architecture.graph, logit_cap=0.0)
    sources: dict[str, Sources] = {path: TensorSource(FOLDER + path) for path in PROJECTIONS}
    for path, each in described.sources.items():
        if not path.startswith("layers."):
            sources[path] = _in_folder(each)
            continue
        _, index, role = path.split(".", 2)
        sources[f"layers.{first + int(index)}.{role}"] = _in_folder(each)
    architecture = replace(described.architecture, model_type=ASSISTANT, graph=graph, kinds=kinds)
    model = ModelDescription(architecture, sources, ignored=tuple(FOLDER + name for name in UNUSED))
    lent = tuple((lender, target.kinds[lender]) for lender in dict.fromkeys(lenders))
    return DrafterDescription(model, (), False, ASSISTANT, lent, ("join", target.graph.hidden))


def _lender(target: Architecture, index: int, kind: LayerSpec) -> int:
    """Return the model's last layer with a cache that a layer of the assistant can read. Raises CheckpointError."""
    wanted = (kind.mask, kind.rope, kind.head_dim, kind.kv_heads)
    for i, lender in reversed(tuple(enumerate(target.kinds))):
        if not lender.shares and (lender.mask, lender.rope, lender.head_dim, lender.kv_heads) == wanted:
            return i
    heads = f"{kind.kv_heads} heads of {kind.head_dim} numbers"
    raise CheckpointError(f"drafter: its layer {index} reads a cache of {heads}, and the model has none like it")


def _in_folder(sources: Sources) -> Sources:
    """Return the tensors of a constant by their names in a build, where the drafter's begin with FOLDER."""
    assert isinstance(sources, TensorSource)
    return renamed(sources, lambda name: FOLDER + name)
