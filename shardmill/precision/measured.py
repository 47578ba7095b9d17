"""The measured loss of a set of forms: all matrices together, on windows unseen by quantisers and the search.

The model runs in transformers, with the same weights as packages of these forms. Question 1 of a build checks that its
programs equal this model. Only one layer's weights and one block of the vocabulary's logits are in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardmill.gates.naming import Weights
from shardmill.gates.stored import StoredWeights, WholeModel
from shardmill.models.architecture import name_under
from shardmill.precision.original import Original, last_states

CLEAR = 0.1  # nat between the two best tokens; below it a position does not count as decided


@dataclass(frozen=True)
class Figures:
    """Sums over the positions of a text.

    Attributes:
        kl: divergence of the second model's distributions from the first model's, in nats.
        before: the first model's loss on the tokens that follow, in nats.
        after: the second model's loss on the same tokens, in nats.
        same: number of decided positions at which both models have the same most likely token.
        decided: number of positions at which the first model's best token is clear.
    """

    kl: float
    before: float
    after: float
    same: int
    decided: int


class Tally:
    """Sums over the vocabulary for each position, updated block by block."""

    def __init__(self, following: Tensor) -> None:
        """Start with empty sums. Args: following the token after each position [n], -1 if it is not known."""
        n = len(following)
        self.following, self.seen = following, 0
        self.best = torch.full((n, 2), -torch.inf)  # the first model's two largest logits
        self.winners = torch.zeros(2, n, dtype=torch.long)  # the most likely token of each model
        self.now_best = torch.full((n,), -torch.inf)
        self.mass, self.gap, self.now_mass = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
        self.target = torch.zeros(2, n)

    def add(self, was: Tensor, now: Tensor) -> None:
        """Add both models' logits [n, tokens] of the vocabulary's next block."""
        two = was.topk(min(2, was.shape[1]), dim=1)
        now_best, now_place = now.max(dim=1)
        for row, places, better in (
            (0, two.indices[:, 0], two.values[:, 0] > self.best[:, 0]),
            (1, now_place, now_best > self.now_best),
        ):
            self.winners[row] = torch.where(better, places + self.seen, self.winners[row])
        best = torch.cat([self.best, two.values], dim=1).topk(2, dim=1).values
        shift = (self.best[:, 0] - best[:, 0]).double().exp()
        share = (was - best[:, :1]).exp_()
        self.mass = self.mass * shift + share.sum(dim=1)
        self.gap = self.gap * shift + share.mul_(was - now).sum(dim=1)
        highest = torch.maximum(self.now_best, now_best)
        factor = (self.now_best - highest).double().exp()
        self.now_mass = self.now_mass * factor + (now - highest[:, None]).exp_().sum(dim=1)
        self.best, self.now_best = best, highest
        place = self.following - self.seen
        here = (place >= 0) & (place < was.shape[1])
        for row, logits in enumerate((was, now)):
            target = logits.gather(1, place.clamp(0, was.shape[1] - 1)[:, None])[:, 0]
            self.target[row] = torch.where(here, target, self.target[row])
        self.seen += was.shape[1]

    def figures(self) -> Figures:
        """Return the figures, after the whole vocabulary has been added."""
        first = self.best[:, 0].double() + self.mass.log()  # [n], log of the sum of exponentials
        second = self.now_best.double() + self.now_mass.log()
        kl = self.gap / self.mass - first + second
        known = self.following >= 0
        before, after = ((total - row.double())[known] for total, row in zip((first, second), self.target, strict=True))
        decided = self.best[:, 0] - self.best[:, 1] >= CLEAR
        same = (self.winners[0] == self.winners[1]) & decided
        return Figures(float(kl.sum()), float(before.sum()), float(after.sum()), int(same.sum()), int(decided.sum()))


ROWS = 8192  # rows of the LM head at a time


def write_original(model: Original, cut: Sequence[Sequence[int]], to: Path) -> None:
    """Write the original's states for windows of one length: tokens [windows, n], last [windows, n, d].

    Args:
        model: the original.
        cut: tokens of the windows.
        to: a safetensors file; `last` are the states after the last layer.
    """
    states = _run(model, cut, model.weights)
    save_file({"tokens": torch.tensor([list(window) for window in cut]), "last": torch.stack(states)}, to)


def measured_forms(model: Original, original: Path, all_stored: Sequence[StoredWeights]) -> dict[str, float]:
    """Return divergence, growth of the perplexity and top-1 agreement of a model with other weights.

    Args:
        model: the original.
        original: the file that `write_original` wrote.
        all_stored: the other weights of all parts, in the order of a pass.

    Returns:
        kl in nats, perplexity (of the other weights over the original's), error, original (its perplexity), top1
        (a share) and tokens. error is the perplexity's standard error over the windows, 0 for a single window.
    """
    with safe_open(original, framework="pt") as stored:
        cut: list[list[int]] = stored.get_tensor("tokens").tolist()
        last = list(stored.get_tensor("last"))
    whole = WholeModel(all_stored)
    names = {tensor.source.tensor for one in all_stored for tensor in one.part.tensors}

    def weights(name: str) -> Tensor:
        held_here = name == "lm_head.bias" or name_under(all_stored[0].prefix, name) in names
        return whole(name) if held_here else model.weights(name)

    states = _run(model, cut, weights)
    tallies = [Tally(torch.tensor([*window[1:], -1])) for window in cut]
    first = 0
    for block in _joined(whole.head()):
        rows_before = model.head[first : first + len(block)]
        for tally, before, after in zip(tallies, last, states, strict=True):
            was = _logits(model, before, rows_before, model.weights, first)
            tally.add(was, _logits(model, after, block, weights, first))
        first += len(block)
    return _summed(tallies)


def _summed(tallies: Sequence[Tally]) -> dict[str, float]:
    """Return the figures of all windows, which are equally long."""
    tokens = sum(len(tally.following) for tally in tallies)
    figures = [tally.figures() for tally in tallies]
    followed = tokens // len(figures) - 1  # in each window; nothing is known to follow its last token
    before = fmean(one.before / followed for one in figures)
    grown = [(one.after - one.before) / followed for one in figures]  # nats
    ratio = math.exp(fmean(grown))
    return {
        "kl": sum(one.kl for one in figures) / tokens,
        "perplexity": ratio,
        "error": ratio * stdev(grown) / math.sqrt(len(grown)) if len(grown) > 1 else 0.0,
        "original": math.exp(before),
        "top1": sum(one.same for one in figures) / max(1, sum(one.decided for one in figures)),
        "tokens": tokens,
    }


def _run(model: Original, cut: Sequence[Sequence[int]], weights: Weights) -> list[Tensor]:
    """Return the states after the last layer, [n, d] for each window."""
    states = [model.reference.first(window, lambda ids: model.table[ids], weights) for window in cut]
    return last_states(model, states, 0, weights)


def _logits(model: Original, states: Tensor, rows: Tensor, weights: Weights, first: int) -> Tensor:
    """Return logits [n, rows] of some rows of the LM head, from row `first` on."""

    def own(name: str) -> Tensor:
        tensor = weights(name)
        return tensor[first : first + len(rows)] if name == "lm_head.bias" else tensor

    return model.reference.logits(states, [rows], own)


def _joined(rows: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield larger blocks of rows as copies, because each incoming block overwrites the block before it."""
    blocks: list[Tensor] = []
    for block in rows:
        blocks.append(block.clone())
        if sum(map(len, blocks)) >= ROWS:
            yield torch.cat(blocks)
            blocks = []
    if blocks:
        yield torch.cat(blocks)
