"""Hidden states of the original model on a calibration text at the edges of parts, so that all parts can start at once.

Quantisers see the windows of the text's first half. The windows of its second half are held out from quantisers, and
the search chooses forms by them. Reports of quality must use a different text.
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
    """Return the matrices of a part by their paths, each with its blocks."""
    blocks: dict[str, list[Constant]] = {path: [] for path in matrices(part.shapes)}
    for tensor in part.tensors:
        if tensor.path in blocks:
            blocks[tensor.path].append(tensor)
    return blocks


def module_of(blocks: Sequence[Constant]) -> str:
    """Return the transformers module whose input is multiplied with a matrix; empty if it is not known.

    The module is known if the rows of the matrix are rows of one module's weight. Then a program's matrix has that
    module's inputs, even if its rows are picked, repeated or scaled.
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
    """Sum up the inputs of modules that run inside the block."""
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
    """Return the Hessians of one layer by module, and the hidden states after the layer.

    Args:
        model: the original.
        hidden: the layer's inputs, [n, d] for each window.
        index: the layer's index.
        names: the modules' names.
    """
    with torch.no_grad(), observed_inputs(model.reference.model, names) as sums:
        after = [model.reference.layers(states, [index], model.weights)[0] for states in hidden]
    return sums.of, after


LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Matrix:
    """A matrix of a program.

    Attributes:
        path: the matrix' name in the contract.
        blocks: the blocks that make up the matrix.
        weight: [rows, columns] in fp32.
        hessian: H [columns, columns]; None if no module of transformers has the same inputs, as for experts.
        before: the states of each held-out window before its layer, or after the last layer for a head, [n, d].
        index: its layer's index; the number of layers for a head.
    """

    path: str
    blocks: list[Constant]
    weight: Tensor
    hessian: Tensor | None
    before: list[Tensor]
    index: int


def calibrated_matrices(
    part: Part, source: Path, model: Original, seen: list[Tensor], held_out: list[Tensor]
) -> Iterator[Matrix]:
    """Yield every matrix of a part of a decoder, layer by layer.

    The next layer's inputs are computed with the original weights.

    Args:
        part: layers or a head.
        source: the checkpoint's folder.
        model: the original.
        seen: states of windows before the part's first layer, for H.
        held_out: states of the held-out windows before the part's first layer.
    """
    constants, by_path = PartWeights(part, source), sites(part)
    if part.kind == "experts":  # a router decides what reaches them
        for path, blocks in by_path.items():
            yield Matrix(path, blocks, constants[path], None, [], part.start)
        return
    if part.kind == "head":
        inputs = Sums()
        for states in seen:
            inputs.add("head", model.reference.normed(states, model.weights))
        for path, blocks in by_path.items():
            yield Matrix(path, blocks, constants[path], inputs.of.get("head"), held_out, model.layers)
        return
    for index in range(part.start, part.end):
        of_layer = {path: blocks for path, blocks in by_path.items() if _layer(path) == index}
        modules = {path: module_of(blocks) for path, blocks in of_layer.items()}
        sums, seen = _layer_inputs(model, seen, index, sorted({*modules.values()} - {""}))
        for path, blocks in of_layer.items():
            yield Matrix(path, blocks, constants[path], sums.get(modules[path]), held_out, index)
        held_out = [model.reference.layers(states, [index], model.weights)[0] for states in held_out]


def _layer(path: str) -> int:
    """Return the index of a constant's layer."""
    match = LAYER.match(path)
    assert match is not None
    return int(match[1])


SEEN, HELD = "seen", "held"


@dataclass(frozen=True)
class Edges:
    """Hidden states of windows before a layer (or after the last), [n, d] for each window."""

    seen: list[Tensor]
    held: list[Tensor]


def write_edges(
    model: Original, seen: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]], wanted: Collection[int], to: Path
) -> None:
    """Run the original model over windows of one length and keep its states before some layers.

    Args:
        model: the original.
        seen: tokens of the windows that quantisers see.
        held_out: tokens of the held-out windows.
        wanted: indices of layers; the number of layers stands for the states after the last layer.
        to: a safetensors file to write: seen_I and held_I [windows, n, d] for each index I.
    """
    last, stacked = max(wanted), dict[str, Tensor]()
    for name, cut in ((SEEN, seen), (HELD, held_out)):
        states = [model.reference.first(window, lambda ids: model.table[ids], model.weights) for window in cut]
        for index in range(last + 1):
            if index in wanted:
                stacked[f"{name}_{index}"] = torch.stack(states)
            if index < last:
                states = [model.reference.layers(one, [index], model.weights)[0] for one in states]
    save_file(stacked, to)


def read_edges(file: Path, index: int) -> Edges:
    """Return the states before a layer."""
    with safe_open(file, framework="pt") as states:
        return Edges(*(list(states.get_tensor(f"{name}_{index}")) for name in (SEEN, HELD)))
