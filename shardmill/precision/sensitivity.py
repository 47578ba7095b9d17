"""What a form of one matrix costs: how far the next-token distribution moves if nothing else is changed.

Only one form of each matrix is measured, in which it errs by enough to be seen. What another costs is taken from that
in proportion to the squared error of the matrix' outputs, which is known of every form.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from shardmill.convert.weights import read
from shardmill.gates.naming import Weights
from shardmill.gates.reference import give_back
from shardmill.models.sources import put_back
from shardmill.plan import Constant
from shardmill.precision.original import Original, head_blocks, last_states

PASS = 128  # positions whose logits are in memory at a time: fewer would expand the LM head more often
POSITIONS = 16  # of these, whose distributions are compared at a time


class Known:
    """The distributions of one model, to which those of others are compared.

    They lie in a file, as those of a few thousand positions take gigabytes; threads may read them side by side.
    """

    def __init__(self, logits: Iterable[Tensor], spool: IO[bytes]) -> None:
        """Keeps them.

        Args:
            logits: [n, vocab] in blocks of positions, each of which may lie where the one before it lay.
            spool: a file to append to, which stays open.
        """
        self.file = spool.fileno()
        self.known: list[tuple[int, Tensor]] = []  # where a block's shares lie, and its negative entropies [n]
        for rows in _few(logits):
            total = rows.logsumexp(dim=-1, keepdim=True)
            shares = (rows - total).exp_()
            self.known.append((spool.tell(), (shares * rows).sum(dim=-1).double() - total[:, 0]))
            spool.write(shares.numpy().data)
        spool.flush()

    def divergence(self, logits: Iterable[Tensor]) -> float:
        """Mean KL divergence in nats of the distributions of other logits, in the same blocks, from the known ones."""
        found, room = [], torch.empty(0)
        for (place, own), rows in zip(self.known, _few(logits), strict=True):
            room = room if len(room) else torch.empty_like(rows)
            shares = room[: len(rows)]
            os.preadv(self.file, [shares.numpy().data], place)
            crossed = shares.mul_(rows).sum(dim=-1).double() - rows.logsumexp(dim=-1)
            found.append(own - crossed)
        return float(torch.cat(found).mean())


def _few(logits: Iterable[Tensor]) -> Iterator[Tensor]:
    """Blocks of POSITIONS."""
    return (rows for block in logits for rows in torch.split(block, POSITIONS))


class Costs:
    """Measures what changed weights cost, on held-out windows that run from some layer on."""

    def __init__(self, model: Original, hidden: Sequence[Tensor], index: int, spool: IO[bytes]) -> None:
        """Runs the original.

        Args:
            model: the original.
            hidden: the states [n, d] of windows before the layer `index`.
            index: of that layer.
            spool: a file for distributions, which stays open.
        """
        self.model, self.room = model, torch.empty(PASS, len(model.head))
        found = self._logits(hidden, index, model.weights, head_blocks(model.head))
        self.original = [Known(logits, spool) for logits in found]

    def beside(self, model: Original) -> Costs:
        """The same for another thread. Args: model the original once more, which no other thread runs."""
        other = copy(self)
        other.model, other.room = model, torch.empty_like(self.room)
        return other

    def of_layer(self, hidden: Sequence[Tensor], index: int, changed: Mapping[str, Tensor]) -> float:
        """Mean KL divergence in nats if tensors of the checkpoint are others.

        Args:
            hidden: the original states before the layer that they belong to.
            index: of that layer.
            changed: tensors by the checkpoint's names.
        """
        own, head = self.model.weights, head_blocks(self.model.head)
        found = self._logits(hidden, index, lambda name: changed[name] if name in changed else own(name), head)
        return self._divergence(found)

    def of_head(self, hidden: Sequence[Tensor], first: int, rows: Tensor) -> float:
        """The same if rows of the LM head, from row `first` on, are others; `hidden` is after the last layer."""
        blocks = head_blocks(self.model.head, first, rows)
        return self._divergence(self._logits(hidden, self.model.layers, self.model.weights, blocks))

    def _logits(
        self, hidden: Sequence[Tensor], index: int, weights: Weights, head: Iterable[Tensor]
    ) -> Iterator[Iterator[Tensor]]:
        """Of each window in turn [n, vocab], in blocks of positions which all lie in the same place."""
        for states in last_states(self.model, hidden, index, weights):
            yield (
                self.model.reference.logits(some, head, weights, into=self.room[: len(some)])
                for some in torch.split(states, PASS)
            )
        give_back()  # once for a matrix

    def _divergence(self, found: Iterable[Iterable[Tensor]]) -> float:
        apart = [known.divergence(logits) for known, logits in zip(self.original, found, strict=True)]
        return sum(apart) / len(apart)


def as_stored(blocks: Sequence[Constant], values: Tensor, source: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors by name, as a matrix of other values would have them.

    Args:
        blocks: of which the matrix is made, under each other.
        values: of the matrix [rows, columns].
        source: the checkpoint's folder.
    """
    found: dict[str, Tensor] = {}
    for tensor in blocks:
        name = tensor.source.tensor
        if name not in found:
            found[name] = read(tensor, source).float()
        row, column = tensor.at
        put_back(found[name], values[row : row + tensor.shape[0], column : column + tensor.shape[1]], tensor.source)
    return found
