"""What the matrices of a part cost one by one in four bits, by the codes that were chosen for them.

Threads take matrices in turn. Each has a model of its own and computes on itself alone, so the costs are the same for
any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardmill.convert.stream import single_threaded_torch
from shardmill.files import parse_json
from shardmill.forms.form import INT4
from shardmill.plan import Constant, Part
from shardmill.precision.calibration import read_edges
from shardmill.precision.matrices import matrices
from shardmill.precision.original import Original
from shardmill.precision.part_codes import ERRORS
from shardmill.precision.quantisers import Codes
from shardmill.precision.sensitivity import Costs, as_stored


@dataclass(frozen=True)
class Changed:
    """A matrix in four bits.

    Attributes:
        path: what the contract calls it.
        blocks: of which it is made.
        before: the states of each held-out window before its layer, or after the last layer for a head, [n, d].
        index: of its layer.
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
    """{path: {"kl": nats, "errors": {form: share}}} of every matrix whose inputs calibration has seen.

    Args:
        part: layers or a head.
        source: the checkpoint's folder.
        originals: makes the original model, for each thread one.
        edges: the calibration's file.
        codes: the part's file of codes.
        scratch: a folder with room for the held-out windows' distributions.
        threads: how many measure.
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

        index = part.start if part.kind == "layers" else model.layers
        edge = read_edges(edges, index)
        first = Costs(model, edge.held, index, spool)
        idle: SimpleQueue[Costs] = SimpleQueue()
        for each in (first, *(first.beside(another()) for _ in range(threads - 1))):
            idle.put(each)

        found: dict[str, Future[float]] = {}
        for matrix in matrices(part, source, another(), [], edge.held):
            if matrix.path in errors:
                costs = idle.get()  # so that no more matrices are there than threads
                for one in found.values():
                    if one.done():
                        one.result()  # what went wrong ends the others
                changed = Changed(matrix.path, matrix.blocks, matrix.before, matrix.index)
                found[matrix.path] = kl = pool.submit(_cost, part, source, costs, changed, codes)
                kl.add_done_callback(partial(_put_back, idle, costs))
        return {path: {"kl": kl.result(), "errors": errors[path]} for path, kl in found.items()}


def _put_back(idle: SimpleQueue[Costs], costs: Costs, _: Future[float]) -> None:
    """Another matrix may have its model."""
    idle.put(costs)


def _cost(part: Part, source: Path, costs: Costs, changed: Changed, codes: Path) -> float:
    """Mean KL divergence in nats if one matrix is stored in four bits."""
    name = f"{changed.path}.{INT4}"
    with safe_open(codes, framework="pt") as stored:
        values = Codes(stored.get_tensor(f"{name}.codes"), stored.get_tensor(f"{name}.scale")).values
    if part.kind == "head":
        return costs.of_head(changed.before, part.start, values)
    return costs.of_layer(changed.before, changed.index, as_stored(changed.blocks, values, source))
