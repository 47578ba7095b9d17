"""The original model in transformers, as its checkpoint lies on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardmill.gates.naming import Weights
from shardmill.gates.reference import HEAD_ROWS, Reference, checkpoint_weights


@dataclass(frozen=True)
class Original:
    """The model without weights, and the source of its weights.

    Attributes:
        table: the embedding [vocab, d], mapped.
        head: the LM head's rows [vocab, d], mapped.
    """

    reference: Reference
    weights: Weights
    table: Tensor
    head: Tensor

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return len(self.reference.decoder.layers)


def original(source: Path, plan: Mapping[str, Any], often: bool = False) -> Original:
    """Return the model of a checkpoint's folder.

    Args:
        source: the folder.
        plan: the content of plan.json.
        often: whether its layers are run thousands of times, see Reference.
    """
    weights = checkpoint_weights(source, plan["prefix"])
    model = Reference(source, plan["context"], often=often)
    table = weights(f"model.{model.tables[0]}.weight")
    head = table if plan["architecture"]["tied"] else weights("lm_head.weight")
    return Original(model, weights, table, head)


def last_states(model: Original, states: Sequence[Tensor], first: int, weights: Weights) -> list[Tensor]:
    """Return states of windows after the last layer, each [n, d]; a layer's weights are made once for all windows.

    Args:
        model: the model whose layers run.
        states: the states before the layer `first`.
        first: the index of that layer.
        weights: the weights of the layers.
    """
    after = list(states)
    for index in range(first, model.layers):
        once = cache(weights)
        after = [model.reference.layers(one, [index], once)[0] for one in after]
    return after


def head_blocks(head: Tensor, first: int = 0, changed: Tensor | None = None) -> list[Tensor]:
    """Return an LM head's rows in blocks, with the rows from `first` on replaced by `changed`."""
    if changed is None:
        return list(torch.split(head, HEAD_ROWS))
    after = first + len(changed)
    return [
        block for rows in (head[:first], changed, head[after:]) if len(rows) for block in torch.split(rows, HEAD_ROWS)
    ]
