"""How far the shipped programs' distributions, over tokens or labels, are from the original's, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.thresholds import CLEAR_MARGIN

POSITIONS = 32  # positions to compare at a time: with a large vocabulary, the distributions of all take gigabytes


@dataclass(frozen=True)
class DistributionComparison:
    """Two models' distributions over tokens or labels, position by position, each field [n]."""

    divergence: Tensor  # of the shipped distribution from the original's, in nats
    margin: Tensor  # between the original's two best tokens, in nats
    agree: Tensor  # True if both have the same most likely token
    loss: Tensor  # the original's -log p(the token that follows)
    shipped_loss: Tensor

    @property
    def clear(self) -> Tensor:
        """Return whether the original is decided, [n]."""
        return self.margin >= CLEAR_MARGIN


def compare_distributions(original: Tensor, shipped: Tensor, following: Tensor | None = None) -> DistributionComparison:
    """Compare logits [n, vocab] position by position.

    The results are allocated first: if they were allocated between blocks that come and go, the heap would fragment by
    hundreds of MB.

    Args:
        original: the original's logits.
        shipped: the logits of the shipped programs.
        following: the token after each position, [n]; None for labels, which no token follows: the losses then mean
            nothing.
    """
    n = len(original)
    following = torch.zeros(n, dtype=torch.int64) if following is None else following
    compared = DistributionComparison(
        torch.empty(n), torch.empty(n), torch.empty(n, dtype=torch.bool), torch.empty(n), torch.empty(n)
    )
    for first in range(0, n, POSITIONS):
        rows = slice(first, first + POSITIONS)
        p, q = log_softmax(original[rows], -1), log_softmax(shipped[rows], -1)
        best = p.topk(min(2, p.shape[-1]), dim=-1).values
        compared.divergence[rows] = kl_div(q, p, reduction="none", log_target=True).sum(-1)
        compared.margin[rows] = best[:, 0] - best[:, -1]
        compared.agree[rows] = p.argmax(-1) == q.argmax(-1)
        compared.loss[rows], compared.shipped_loss[rows] = (-x.gather(1, following[rows, None])[:, 0] for x in (p, q))
    return compared


def clear_agreement(name: str, compared: DistributionComparison, counted: str, undecided: str) -> Measurement | NotRun:
    """Return the agreement on the most likely token or label at positions where the original is decided.

    Args:
        name: the measurement's name.
        compared: the comparison.
        counted: a text for the detail, in which {} stands for the number of these positions.
        undecided: the reason for a text in which the original is decided nowhere.
    """
    clear, agree = compared.clear, compared.agree
    if not bool(clear.any()):
        return NotRun(name, undecided)
    close = f"{int(agree[~clear].sum())} of {int((~clear).sum())} others agree"
    return Measurement(name, float(agree[clear].float().mean()), f"{counted.format(int(clear.sum()))}; {close}")
