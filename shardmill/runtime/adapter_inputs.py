"""Lays the matrices of an adapter out as the inputs of programs, see models/adapters.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.checkpoint.peft import LoraModule, Matrix
from shardmill.errors import CheckpointError
from shardmill.models.adapters import DOWN, Factor, layer_stacks
from shardmill.models.architecture import Graph, LayerSpec, Sources, TensorSource, blocks
from shardmill.models.caches import Shape
from shardmill.models.layer_constants import mixer_constants
from shardmill.printable import printable

HALF_MAX = 65504.0  # the largest fp16 number
Halves = NDArray[np.float16]


def laid_out(
    read: Callable[[str], LoraModule | None],
    graph: Graph,
    kinds: Mapping[int, LayerSpec],
    sources: Mapping[str, Sources],
    parts: Sequence[Mapping[str, Any]],
    rank: int,
    where: Path,
) -> dict[str, Halves]:
    """Return matrices as inputs of programs: arrays [1, n, rows, width] by PART.INPUT.

    Args:
        read: returns the matrices of a module, by its name in transformers' decoder; None if it stays as it is.
        graph: the base model's.
        kinds: the layers by their index, all or some.
        sources: the sources of the constants of these layers, by path.
        parts: the entries of parts that take adapters, in plan.json or model.json.
        rank: the rows of a matrix in the inputs.
        where: what the matrices come from, for errors.

    Raises:
        CheckpointError: if matrices do not fit their module, or fp16 can't hold them.
    """
    taken = [(part, name) for part in parts for name in part["adapters"]]
    arrays = {f"{part['name']}.{name}": np.zeros(part["inputs"][name], np.float16) for part, name in taken}
    for (index, projection), source in projection_sources(graph, kinds, sources):
        slices = [(p, name, p["adapters"][name].index(index)) for p, name in taken if index in p["adapters"][name]]
        lora = read(source.module) if slices else None
        if lora is None:
            continue
        stacks = layer_stacks(graph, kinds[index])
        columns = next(stack.width for stack in stacks.values() if Factor(projection, DOWN) in stack.factors)
        down, up = _pair(lora, source, columns, f"{where}: {printable(source.module)}")
        for part, name, place in slices:
            for i, factor in enumerate(stacks[name].factors):
                if factor.projection == projection:
                    values = down if factor.side == DOWN else up.T
                    arrays[f"{part['name']}.{name}"][0, place, i * rank : i * rank + len(values)] = values
    return arrays


@dataclass(frozen=True)
class RowSource:
    """The rows of a module's weight that make up a projection, in order, and the factor that they have there.

    Attributes:
        held: how many rows the weight has.
    """

    module: str
    rows: NDArray[np.int64]
    held: int
    times: float


def projection_sources(
    graph: Graph, kinds: Mapping[int, LayerSpec], sources: Mapping[str, Sources]
) -> Iterator[tuple[tuple[int, str], RowSource]]:
    """Yield the source of each projection that programs have inputs for, by its layer and its path there.

    Args:
        graph: the base model's.
        kinds: the layers by their index.
        sources: the sources of the layers' constants, by path.
    """
    for index, kind in kinds.items():
        shapes = mixer_constants(graph, kind)
        paths = {factor.projection for stack in layer_stacks(graph, kind).values() for factor in stack.factors}
        for path in sorted(paths):
            constant, rows = _constant(graph.of(kind), path)
            pieces = blocks(sources[f"layers.{index}.{constant}.weight"])
            yield (index, path), _row_source(pieces, shapes[f"{constant}.weight"], rows)


def _constant(g: Graph, path: str) -> tuple[str, slice]:
    """Return the constant that holds a projection, and the projection's rows there."""
    q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    if not g.fused or path.endswith(("o_proj", "down_proj")):
        return path, slice(None)
    qkv, both = "self_attn.qkv_proj", "mlp.gate_up_proj"
    return {
        "self_attn.q_proj": (qkv, slice(q)),
        "self_attn.k_proj": (qkv, slice(q, q + kv)),
        "self_attn.v_proj": (qkv, slice(q + kv, None)),
        "mlp.gate_proj": (both, slice(g.ffn)),
        "mlp.up_proj": (both, slice(g.ffn, None)),
    }[path]


def _row_source(pieces: Sequence[TensorSource], shape: Shape, rows: slice) -> RowSource:
    """Return the source of some rows of a constant.

    Args:
        pieces: the blocks of the constant.
        shape: its shape.
        rows: the rows.

    Raises:
        CheckpointError: if the blocks are more than rows of one matrix with a factor.
    """
    first = pieces[0]
    if any(
        one != replace(TensorSource(first.tensor, times=first.times), rows=one.rows, shape=one.shape) for one in pieces
    ):
        raise CheckpointError(
            f"{first.tensor}: no adapter of this tensor can be an input, since programs hold another matrix"
        )
    count = (first.shape or shape)[0]
    every = np.concatenate([np.arange(*(one.rows or (0, count, 1))) for one in pieces])
    return RowSource(first.tensor.removesuffix(".weight"), every[rows], count, first.times)


def _pair(lora: LoraModule, source: RowSource, columns: int, where: str) -> tuple[Matrix, Matrix]:
    """Return A [r, in] and B [out, r] of a projection, the factor included.

    Both are multiplied by powers of two until they are about equally large: B may be so small that fp16 would hold few
    of its digits, and the product stays the same.

    Args:
        lora: the module's matrices.
        source: the projection's rows of the module.
        columns: columns of the module's weight.
        where: names the module in errors.

    Raises:
        CheckpointError: if the matrices do not have the widths, or fp16 can't hold them.
    """
    widths = (lora.b.shape[0], lora.a.shape[1])
    if widths != (source.held, columns):
        base = f"the base model's weight is {source.held} x {columns}"
        raise CheckpointError(f"{where}: its matrices are for a weight of {widths[0]} x {widths[1]}; {base}")
    a, b = lora.a, lora.b[source.rows] * np.float32(lora.scaling * source.times)
    largest = [float(np.abs(one).max(initial=0.0)) for one in (a, b)]
    shift = round(math.log2(largest[0] / largest[1]) / 2) if all(largest) else 0
    a, b = np.ldexp(a, -shift), np.ldexp(b, shift)
    if max(float(np.abs(one).max(initial=0.0)) for one in (a, b)) > HALF_MAX:
        raise CheckpointError(f"{where}: has a number that fp16 can't hold; train it again with a smaller alpha")
    return a, b
