"""What a form of one matrix costs: how far the next-token distribution moves if nothing else is changed.

Only one form of each matrix is measured, in which it errs by enough to be seen. What another costs is taken from that
in proportion to the squared error of the matrix' outputs, which is known of every form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor
from torch.nn.functional import log_softmax

from shardmill.convert.weights import read
from shardmill.gates.naming import Weights
from shardmill.gates.reference import Reference
from shardmill.models.sources import put_back
from shardmill.plan import Tensor as Constant

POSITIONS = 128  # whose distributions are compared at a time


def divergence(original: Tensor, changed: Tensor) -> float:
    """Mean KL divergence in nats of distributions from the original ones, both logits [n, vocab]."""
    total = 0.0
    for start in range(0, len(original), POSITIONS):
        was, now = original[start : start + POSITIONS], changed[start : start + POSITIONS]
        known, found = log_softmax(was, dim=-1), log_softmax(now, dim=-1)
        total += float((known.exp() * (known - found)).sum(dim=-1).double().sum())
    return total / len(original)


class Costs:
    """Measures what changed weights cost, on held-out windows that run from some layer on."""

    def __init__(self, reference: Reference, head: Callable[[], Iterable[Tensor]], weights: Weights) -> None:
        self.reference, self.head, self.weights = reference, head, weights
        self.last = len(reference.decoder.layers)

    def logits(self, hidden: Sequence[Tensor], index: int, weights: Weights | None = None) -> list[Tensor]:
        """Logits [n, vocab] of windows from their states before a layer; with the original weights if None."""
        rest = range(index, self.last)
        return [self.reference.logits(one, self.head(), weights or self.weights, rest) for one in hidden]

    def of(
        self, hidden: Sequence[Tensor], index: int, original: Sequence[Tensor], changed: Mapping[str, Tensor]
    ) -> float:
        """Mean KL divergence in nats if some of the checkpoint's tensors are others, given the original logits."""
        found = self.logits(hidden, index, lambda name: changed[name] if name in changed else self.weights(name))
        pairs = zip(original, found, strict=True)
        return sum(divergence(was, now) for was, now in pairs) / len(original)


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
