"""A part's matrices one by one, each with what calibration has seen of its inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shardmill.convert.weights import PartWeights
from shardmill.plan import Constant, Part
from shardmill.precision import observe
from shardmill.precision.original import Original

LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Matrix:
    """A matrix of a program.

    Attributes:
        path: what the contract calls it.
        blocks: of which it is made.
        weight: [rows, columns] in fp32.
        hessian: H [columns, columns]; None where transformers has no module whose inputs are its own, as for experts.
        before: the states of each held-out window before its layer, or after the last layer for a head, [n, d].
        index: of its layer; the number of layers for a head.
    """

    path: str
    blocks: list[Constant]
    weight: Tensor
    hessian: Tensor | None
    before: list[Tensor]
    index: int


def matrices(part: Part, source: Path, model: Original, seen: list[Tensor], held: list[Tensor]) -> Iterator[Matrix]:
    """Every matrix of a part of a decoder, layer by layer; the next layer's inputs are made by the original weights.

    Args:
        part: layers or a head.
        source: the checkpoint's folder.
        model: the original.
        seen: states of windows before the part's first layer, for H.
        held: the same of the windows that are held out.
    """
    constants, found = PartWeights(part, source), observe.sites(part)
    if part.kind == "experts":  # a router decides what reaches them
        for path, blocks in found.items():
            yield Matrix(path, blocks, constants[path], None, [], part.start)
        return
    if part.kind == "head":
        inputs = observe.Sums()
        for states in seen:
            inputs.add("head", model.reference.normed(states, model.weights))
        for path, blocks in found.items():
            yield Matrix(path, blocks, constants[path], inputs.of.get("head"), held, model.layers)
        return
    for index in range(part.start, part.end):
        own = {path: blocks for path, blocks in found.items() if _layer(path) == index}
        modules = {path: observe.module_of(blocks) for path, blocks in own.items()}
        sums, seen = observe.layer_inputs(model, seen, index, sorted({*modules.values()} - {""}))
        for path, blocks in own.items():
            yield Matrix(path, blocks, constants[path], sums.get(modules[path]), held, index)
        held = [model.reference.layers(states, [index], model.weights)[0] for states in held]


def _layer(path: str) -> int:
    """The index of a constant's layer."""
    found = LAYER.match(path)
    assert found is not None
    return int(found[1])
