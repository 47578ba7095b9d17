"""Two models' next-token distributions compared, while their logits come in blocks of the vocabulary.

Of a large vocabulary all logits take gigabytes. What is compared are sums over it, which can grow block by block: sums
of exponentials are kept relative to the largest logit so far, as in a softmax that is made online. A block's own sums
are in fp32, which PyTorch adds up pairwise; those over the blocks are in fp64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CLEAR = 0.1  # nat between the two best tokens; below it either is as good


@dataclass(frozen=True)
class Figures:
    """Sums over the positions of a text.

    Attributes:
        kl: nats, of the second model's distributions from the first's.
        before: nats that the first loses on the tokens that follow.
        after: the same of the second.
        same: at how many of the decided positions both have the same most likely token.
        decided: how many there are.
    """

    kl: float
    before: float
    after: float
    same: int
    decided: int


class Tally:
    """Sums over the vocabulary for each position, as far as blocks have come in."""

    def __init__(self, following: Tensor) -> None:
        """Begins with nothing. Args: following the token after each position [n], -1 where none is known."""
        n = len(following)
        self.following, self.seen = following, 0
        self.best = torch.full((n, 2), -torch.inf)  # the first model's two largest logits
        self.winners = torch.zeros(2, n, dtype=torch.long)  # the most likely token of each model
        self.now_best = torch.full((n,), -torch.inf)
        self.mass, self.gap, self.now_mass = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
        self.target = torch.zeros(2, n)

    def add(self, was: Tensor, now: Tensor) -> None:
        """Counts the logits of the next tokens of the vocabulary, [n, tokens] of either model."""
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
        kept = (self.now_best - highest).double().exp()
        self.now_mass = self.now_mass * kept + (now - highest[:, None]).exp_().sum(dim=1)
        self.best, self.now_best = best, highest
        place = self.following - self.seen
        here = (place >= 0) & (place < was.shape[1])
        for row, logits in enumerate((was, now)):
            found = logits.gather(1, place.clamp(0, was.shape[1] - 1)[:, None])[:, 0]
            self.target[row] = torch.where(here, found, self.target[row])
        self.seen += was.shape[1]

    def figures(self) -> Figures:
        """What it comes to, once all of the vocabulary has come in."""
        first = self.best[:, 0].double() + self.mass.log()  # [n], log of the sum of exponentials
        second = self.now_best.double() + self.now_mass.log()
        kl = self.gap / self.mass - first + second
        known = self.following >= 0
        before, after = ((total - row.double())[known] for total, row in zip((first, second), self.target, strict=True))
        decided = self.best[:, 0] - self.best[:, 1] >= CLEAR
        same = (self.winners[0] == self.winners[1]) & decided
        return Figures(float(kl.sum()), float(before.sum()), float(after.sum()), int(same.sum()), int(decided.sum()))
