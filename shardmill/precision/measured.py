"""What a set of forms really costs: all matrices at once, on windows that neither quantisers nor the search have seen.

The model runs in transformers, its weights as packages of these forms would hold them; question 1 of a build says that
its programs are that model. A layer's weights are in memory at a time, and a block of the vocabulary's logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardmill.gates.naming import Weights
from shardmill.gates.weights import HeldWeights, held_weights, transformers_name
from shardmill.precision.original import Original, last_states
from shardmill.precision.tally import Tally

ROWS = 8192  # of the LM head at a time


def write_original(model: Original, cut: Sequence[Sequence[int]], to: Path) -> None:
    """Writes what the original makes of windows of one length: tokens [windows, n], last [windows, n, d].

    Args:
        model: the original.
        cut: tokens of the windows.
        to: a safetensors file; `last` are the states after the last layer.
    """
    states = _run(model, cut, model.weights)
    save_file({"tokens": torch.tensor([list(window) for window in cut]), "last": torch.stack(states)}, to)


def measured(model: Original, original: Path, held: Sequence[HeldWeights]) -> dict[str, float]:
    """Divergence, growth of the perplexity and agreement on the most likely token of a model with other weights.

    Args:
        model: the original.
        original: what `write_original` wrote.
        held: the other weights of all parts, in the order of a pass.

    Returns:
        kl in nats, perplexity (of the other weights over the original's), error (the perplexity's standard error,
        by how windows differ; 0 for a single one), original (its perplexity), top1 (a share) and tokens.
    """
    with safe_open(original, framework="pt") as stored:
        cut: list[list[int]] = stored.get_tensor("tokens").tolist()
        last = list(stored.get_tensor("last"))
    found, rows = held_weights(held)
    names = {transformers_name(tensor, one.prefix) for one in held for tensor in one.part.tensors} | {"lm_head.bias"}

    def weights(name: str) -> Tensor:
        return found(name) if name in names else model.weights(name)

    states = _run(model, cut, weights)
    tallies = [Tally(torch.tensor([*window[1:], -1])) for window in cut]
    first = 0
    for block in _joined(rows):
        rows_before = model.head[first : first + len(block)]
        for tally, before, after in zip(tallies, last, states, strict=True):
            was = _logits(model, before, rows_before, model.weights, first)
            tally.add(was, _logits(model, after, block, weights, first))
        first += len(block)
    return _summed(tallies)


def _summed(tallies: Sequence[Tally]) -> dict[str, float]:
    """The figures of all windows, which are equally long."""
    tokens = sum(len(tally.following) for tally in tallies)
    found = [tally.figures() for tally in tallies]
    followed = tokens // len(found) - 1  # in each window; nothing is known to follow its last token
    before = fmean(one.before / followed for one in found)
    grown = [(one.after - one.before) / followed for one in found]  # nats
    ratio = math.exp(fmean(grown))
    return {
        "kl": sum(one.kl for one in found) / tokens,
        "perplexity": ratio,
        "error": ratio * stdev(grown) / math.sqrt(len(grown)) if len(grown) > 1 else 0.0,
        "original": math.exp(before),
        "top1": sum(one.same for one in found) / max(1, sum(one.decided for one in found)),
        "tokens": tokens,
    }


def _run(model: Original, cut: Sequence[Sequence[int]], weights: Weights) -> list[Tensor]:
    """The states after the last layer, [n, d] for each window."""
    states = [model.reference.first(window, lambda ids: model.table[ids], weights) for window in cut]
    return last_states(model, states, 0, weights)


def _logits(model: Original, states: Tensor, rows: Tensor, weights: Weights, first: int) -> Tensor:
    """Logits [n, rows] of some rows of the LM head, from row `first` on."""

    def own(name: str) -> Tensor:
        found = weights(name)
        return found[first : first + len(rows)] if name == "lm_head.bias" else found

    return model.reference.logits(states, [rows], own)


def _joined(rows: Iterator[Tensor]) -> Iterator[Tensor]:
    """Larger blocks of rows, as copies: each of the blocks that come in overwrites the one before it."""
    kept: list[Tensor] = []
    for block in rows:
        kept.append(block.clone())
        if sum(map(len, kept)) >= ROWS:
            yield torch.cat(kept)
            kept = []
    if kept:
        yield torch.cat(kept)
