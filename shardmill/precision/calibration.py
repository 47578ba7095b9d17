"""What the original model makes of a calibration text at the edges of parts, so that every part can start at once.

Windows of the text's first half are what quantisers see; windows of its second half are held out from them, and by
these the search chooses. Neither may be text that quality is reported on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shardmill.convert.weights import PartWeights
from shardmill.forms.form import matrices
from shardmill.plan import Constant, Part
from shardmill.precision.original import Original


def sites(part: Part) -> dict[str, list[Constant]]:
    """Return the matrices of a part by their paths, each with the blocks that it is made of."""
    found: dict[str, list[Constant]] = {path: [] for path in matrices(part.shapes)}
    for tensor in part.tensors:
        if tensor.path in found:
            found[tensor.path].append(tensor)
    return found


def module_of(blocks: Sequence[Constant]) -> str:
    """Return the module of transformers whose input a matrix is multiplied with; empty where it can't be told.

    It is told where rows of the matrix are rows of one module's weight: then a program's matrix, be its rows picked,
    repeated or scaled, has that module's inputs.
    """
    modules = {block.source.tensor.removesuffix(".weight") for block in blocks}
    plain = all(not (b.source.transposed or b.source.by or b.source.plus or b.source.index) for b in blocks)
    return modules.pop() if len(modules) == 1 and plain else ""


class Sums:
    """H = X^T X of the inputs X that some modules have seen; modules with the same input share one."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def add(self, name: str, x: Tensor) -> None:
        """Count inputs x [..., columns] of a module."""
        if self._last is None or self._last[0] is not x:
            rows = x.reshape(-1, x.shape[-1]).float()
            self._last = x, rows.T @ rows
        self.of[name] = self.of[name] + self._last[1] if name in self.of else self._last[1].clone()


@contextmanager
def observed_inputs(model: nn.Module, names: Sequence[str]) -> Iterator[Sums]:
    """Count the inputs of modules as long as it lasts."""
    sums, modules = Sums(), dict(model.named_modules())

    def hook(name: str) -> Any:
        return lambda _, args: sums.add(name, args[0])

    with ExitStack() as stack:
        for name in names:
            if name in modules:
                stack.callback(modules[name].register_forward_pre_hook(hook(name)).remove)
        yield sums


def _layer_inputs(
    model: Original, hidden: Sequence[Tensor], index: int, names: Sequence[str]
) -> tuple[Mapping[str, Tensor], list[Tensor]]:
    """Return the Hessian by module of one layer, and the hidden states after it.

    Args:
        model: the original.
        hidden: the layer's inputs, [n, d] for each window.
        index: of the layer.
        names: the modules.
    """
    with torch.no_grad(), observed_inputs(model.reference.model, names) as sums:
        after = [model.reference.layers(states, [index], model.weights)[0] for states in hidden]
    return sums.of, after


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


def calibrated_matrices(
    part: Part, source: Path, model: Original, seen: list[Tensor], held: list[Tensor]
) -> Iterator[Matrix]:
    """Yield every matrix of a part of a decoder, layer by layer.

    The next layer's inputs are made by the original weights.

    Args:
        part: layers or a head.
        source: the checkpoint's folder.
        model: the original.
        seen: states of windows before the part's first layer, for H.
        held: the same of the windows that are held out.
    """
    constants, found = PartWeights(part, source), sites(part)
    if part.kind == "experts":  # a router decides what reaches them
        for path, blocks in found.items():
            yield Matrix(path, blocks, constants[path], None, [], part.start)
        return
    if part.kind == "head":
        inputs = Sums()
        for states in seen:
            inputs.add("head", model.reference.normed(states, model.weights))
        for path, blocks in found.items():
            yield Matrix(path, blocks, constants[path], inputs.of.get("head"), held, model.layers)
        return
    for index in range(part.start, part.end):
        own = {path: blocks for path, blocks in found.items() if _layer(path) == index}
        modules = {path: module_of(blocks) for path, blocks in own.items()}
        sums, seen = _layer_inputs(model, seen, index, sorted({*modules.values()} - {""}))
        for path, blocks in own.items():
            yield Matrix(path, blocks, constants[path], sums.get(modules[path]), held, index)
        held = [model.reference.layers(states, [index], model.weights)[0] for states in held]


def _layer(path: str) -> int:
    """Return the index of a constant's layer."""
    found = LAYER.match(path)
    assert found is not None
    return int(found[1])


SEEN, HELD = "seen", "held"


@dataclass(frozen=True)
class Edges:
    """Hidden states of windows before a layer (or after the last), [n, d] for each window."""

    seen: list[Tensor]
    held: list[Tensor]


def write_edges(
    model: Original, seen: Sequence[Sequence[int]], held: Sequence[Sequence[int]], wanted: Collection[int], to: Path
) -> None:
    """Run the original model over windows of one length and keep its states before some layers.

    Args:
        model: the original.
        seen: tokens of the windows that quantisers see.
        held: tokens of those that are held out.
        wanted: indices of layers, or their number for the states after the last.
        to: a safetensors file to write: seen_I and held_I [windows, n, d] for each index I.
    """
    last, found = max(wanted), dict[str, Tensor]()
    for name, cut in ((SEEN, seen), (HELD, held)):
        states = [model.reference.first(window, lambda ids: model.table[ids], model.weights) for window in cut]
        for index in range(last + 1):
            if index in wanted:
                found[f"{name}_{index}"] = torch.stack(states)
            if index < last:
                states = [model.reference.layers(one, [index], model.weights)[0] for one in states]
    save_file(found, to)


def read_edges(file: Path, index: int) -> Edges:
    """Return the states before a layer."""
    with safe_open(file, framework="pt") as states:
        return Edges(*(list(states.get_tensor(f"{name}_{index}")) for name in (SEEN, HELD)))
