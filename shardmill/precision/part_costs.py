"""The loss from storing a part's matrices in four bits, one matrix at a time, with the codes chosen for it.

Threads take matrices in turn. Each thread has a separate model and runs PyTorch on a single thread, so the costs are
the same for any number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardmill.convert.stream import single_threaded_torch
from shardmill.convert.weights import read_tensor
from shardmill.files import parse_json
from shardmill.forms.form import INT4
from shardmill.gates.naming import Weights
from shardmill.gates.reference import return_heap
from shardmill.models.sources import put_back
from shardmill.plan import Constant, Part
from shardmill.precision.calibration import calibrated_matrices, read_edges
from shardmill.precision.original import Original, head_blocks, last_states
from shardmill.precision.part_codes import ERRORS
from shardmill.precision.quantisers import QuantizedMatrix

PASS = 128  # positions whose logits are in memory at a time: fewer would expand the LM head more often
POSITIONS = 16  # positions in a pass whose distributions are compared at a time


class Known:
    """The distributions of one model, for comparison with the distributions of other models.

    They are kept in a file, because a few thousand positions take gigabytes. Several threads may read it at once.
    """

    def __init__(self, logits: Iterable[Tensor], spool: IO[bytes]) -> None:
        """Write the distributions to a file.

        Args:
            logits: [n, vocab] in blocks of positions; a block may reuse the memory of the block before it.
            spool: the file to append to, which stays open.
        """
        self.file = spool.fileno()
        self.known: list[tuple[int, Tensor]] = []  # a block's offset in the file, and its negative entropies [n]
        for rows in _few(logits):
            total = rows.logsumexp(dim=-1, keepdim=True)
            shares = (rows - total).exp_()
            self.known.append((spool.tell(), (shares * rows).sum(dim=-1).double() - total[:, 0]))
            spool.write(shares.numpy().data)
        spool.flush()

    def divergence(self, logits: Iterable[Tensor]) -> float:
        """Return the mean KL divergence in nats of other logits, in equal blocks, from the known logits."""
        divergences, room = [], torch.empty(0)
        for (place, negative_entropies), rows in zip(self.known, _few(logits), strict=True):
            room = room if len(room) else torch.empty_like(rows)
            shares = room[: len(rows)]
            os.preadv(self.file, [shares.numpy().data], place)
            crossed = shares.mul_(rows).sum(dim=-1).double() - rows.logsumexp(dim=-1)
            divergences.append(negative_entropies - crossed)
        return float(torch.cat(divergences).mean())


def _few(logits: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return the logits in blocks of POSITIONS."""
    return (rows for block in logits for rows in torch.split(block, POSITIONS))


class Costs:
    """The measurement of the loss from changed weights, on held-out windows that start at a given layer."""

    def __init__(self, model: Original, hidden: Sequence[Tensor], index: int, spool: IO[bytes]) -> None:
        """Run the original model and keep its distributions.

        Args:
            model: the original.
            hidden: the states [n, d] of windows before the layer `index`.
            index: that layer's index.
            spool: a file for distributions, which stays open.
        """
        self.model, self.room = model, torch.empty(PASS, len(model.head))
        all_logits = self._logits(hidden, index, model.weights, head_blocks(model.head))
        self.original = [Known(logits, spool) for logits in all_logits]

    def beside(self, model: Original) -> Costs:
        """Return a copy for another thread. Args: model another instance of the original for that thread alone."""
        other = copy(self)
        other.model, other.room = model, torch.empty_like(self.room)
        return other

    def of_layer(self, hidden: Sequence[Tensor], index: int, changed: Mapping[str, Tensor]) -> float:
        """Return the mean KL divergence in nats after tensors of the checkpoint are replaced.

        Args:
            hidden: the original states before the changed layer.
            index: that layer's index.
            changed: replacements by the checkpoint's names.
        """
        original, head = self.model.weights, head_blocks(self.model.head)
        logits = self._logits(hidden, index, lambda name: changed[name] if name in changed else original(name), head)
        return self._divergence(logits)

    def of_head(self, hidden: Sequence[Tensor], first: int, rows: Tensor) -> float:
        """Return the KL divergence after head rows from `first` on are replaced; `hidden` is after the last layer."""
        blocks = head_blocks(self.model.head, first, rows)
        return self._divergence(self._logits(hidden, self.model.layers, self.model.weights, blocks))

    def _logits(
        self, hidden: Sequence[Tensor], index: int, weights: Weights, head: Iterable[Tensor]
    ) -> Iterator[Iterator[Tensor]]:
        """Yield the logits of each window in turn [n, vocab], in blocks of positions that share one memory."""
        for states in last_states(self.model, hidden, index, weights):
            yield (
                self.model.reference.logits(some, head, weights, into=self.room[: len(some)])
                for some in torch.split(states, PASS)
            )
        return_heap()  # once per matrix

    def _divergence(self, all_logits: Iterable[Iterable[Tensor]]) -> float:
        apart = [known.divergence(logits) for known, logits in zip(self.original, all_logits, strict=True)]
        return sum(apart) / len(apart)


def as_stored(blocks: Sequence[Constant], values: Tensor, source: Path) -> dict[str, Tensor]:
    """Return the checkpoint's tensors of a matrix by name, with other values of the matrix put into them.

    Args:
        blocks: the blocks that make up the matrix.
        values: the matrix [rows, columns].
        source: the checkpoint's folder.
    """
    tensors: dict[str, Tensor] = {}
    for tensor in blocks:
        name = tensor.source.tensor
        if name not in tensors:
            tensors[name] = read_tensor(tensor, source).float()
        row, column = tensor.at
        put_back(tensors[name], values[row : row + tensor.shape[0], column : column + tensor.shape[1]], tensor.source)
    return tensors


@dataclass(frozen=True)
class Changed:
    """A matrix in four bits.

    Attributes:
        path: the matrix' name in the contract.
        blocks: the blocks that make up the matrix.
        before: the states of each held-out window before its layer, or after the last layer for a head, [n, d].
        index: its layer's index.
    """

    path: str
    blocks: Sequence[Constant]
    before: Sequence[Tensor]
    index: int


def part_costs(
    part: Part,
    source: Path,
    originals: Callable[[], Original],
    edges: Path,
    codes: Path,
    scratch: Path,
    threads: int = 1,
) -> dict[str, Any]:
    """Return {path: {"kl": nats, "errors": {form: share}}} for every matrix whose inputs calibration has seen.

    Args:
        part: layers or a head.
        source: the checkpoint's folder.
        originals: a function that makes a new instance of the original model, as each thread needs one.
        edges: the calibration's file.
        codes: the part's file of codes.
        scratch: a folder with room for the held-out windows' distributions.
        threads: how many threads measure.
    """
    if part.kind == "experts":
        return {}
    with safe_open(codes, framework="pt") as stored:
        errors = parse_json(stored.metadata()[ERRORS])
    with TemporaryFile(dir=scratch) as spool, single_threaded_torch(threads) as pool:
        torch.set_num_threads(1)
        model = originals()

        def another() -> Original:
            return replace(originals(), weights=model.weights, table=model.table, head=model.head)  # mapped once

        index, _ = part.edges(model.layers)
        edge = read_edges(edges, index)
        first = Costs(model, edge.held, index, spool)
        idle: SimpleQueue[Costs] = SimpleQueue()
        for each in (first, *(first.beside(another()) for _ in range(threads - 1))):
            idle.put(each)

        futures: dict[str, Future[float]] = {}
        for matrix in calibrated_matrices(part, source, another(), [], edge.held):
            if matrix.path in errors:
                costs = idle.get()  # waits, so that memory holds no more matrices than threads
                for one in futures.values():
                    if one.done():
                        one.result()  # an error in one measurement ends the others
                changed = Changed(matrix.path, matrix.blocks, matrix.before, matrix.index)
                futures[matrix.path] = kl = pool.submit(_cost, part, source, costs, changed, codes)
                kl.add_done_callback(partial(_put_back, idle, costs))
        return {path: {"kl": kl.result(), "errors": errors[path]} for path, kl in futures.items()}


def _put_back(idle: SimpleQueue[Costs], costs: Costs, _: Future[float]) -> None:
    """Put the model back, so that another matrix may use it."""
    idle.put(costs)


def _cost(part: Part, source: Path, costs: Costs, changed: Changed, codes: Path) -> float:
    """Return the mean KL divergence in nats if one matrix is stored in four bits."""
    name = f"{changed.path}.{INT4}"
    with safe_open(codes, framework="pt") as stored:
        values = QuantizedMatrix(stored.get_tensor(f"{name}.codes"), stored.get_tensor(f"{name}.scale")).values
    if part.kind == "head":
        return costs.of_head(changed.before, part.start, values)
    return costs.of_layer(changed.before, changed.index, as_stored(changed.blocks, values, source))
