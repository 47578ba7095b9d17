"""What the matrices of a layer are multiplied with, seen in transformers' own forward pass with the original weights.

A layer is fed with the original model's hidden states, whatever was decided of the layers before it. So what is found
for a matrix depends on nothing but the checkpoint and the text, and stays when a recipe changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardmill.forms.form import matrices
from shardmill.plan import Constant, Part
from shardmill.precision.original import Original


def sites(part: Part) -> dict[str, list[Constant]]:
    """The matrices of a part by their paths, each with the blocks that it is made of."""
    found: dict[str, list[Constant]] = {path: [] for path in matrices(part.shapes)}
    for tensor in part.tensors:
        if tensor.path in found:
            found[tensor.path].append(tensor)
    return found


def module_of(blocks: Sequence[Constant]) -> str:
    """The module of transformers whose input a matrix is multiplied with; empty where it can't be told.

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
        """Counts inputs x [..., columns] of a module."""
        if self._last is None or self._last[0] is not x:
            rows = x.reshape(-1, x.shape[-1]).float()
            self._last = x, rows.T @ rows
        self.of[name] = self.of[name] + self._last[1] if name in self.of else self._last[1].clone()


@contextmanager
def observed(model: nn.Module, names: Sequence[str]) -> Iterator[Sums]:
    """Counts the inputs of modules as long as it lasts."""
    sums, modules = Sums(), dict(model.named_modules())

    def hook(name: str) -> Any:
        return lambda _, args: sums.add(name, args[0])

    with ExitStack() as stack:
        for name in names:
            if name in modules:
                stack.callback(modules[name].register_forward_pre_hook(hook(name)).remove)
        yield sums


def layer_inputs(
    model: Original, hidden: Sequence[Tensor], index: int, names: Sequence[str]
) -> tuple[Mapping[str, Tensor], list[Tensor]]:
    """H by module of one layer, and the hidden states after it.

    Args:
        model: the original.
        hidden: the layer's inputs, [n, d] for each window.
        index: of the layer.
        names: the modules.
    """
    with torch.no_grad(), observed(model.reference.model, names) as sums:
        after = [model.reference.layers(states, [index], model.weights)[0] for states in hidden]
    return sums.of, after
