"""Linear layers of transformers' model whose matrices are loaded a block of rows at a time.

In fp32 a layer of a large model takes 3.4 GB, and one of its matrices 0.9 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from shardmill.gates.held import HeldWeights
from shardmill.gates.naming import Origin, Weights, origin_of
from shardmill.gates.stored import rows_at_once


def lend(module: nn.Module, prefix: str, origins: Mapping[str, Origin], weights: Weights) -> set[str]:
    """Let a module's linear layers fetch their matrices at each call, until `take_back`.

    A matrix that transformers assembles from several tensors is left to the caller.

    Args:
        module: its parameters are on the meta device.
        prefix: precedes the module's parameter names in the model's state dict.
        origins: for each parameter, its tensors in the checkpoint; a parameter without an entry has the
            same name on disk.
        weights: returns a matrix by its name on disk.

    Returns:
        The names, within the module, of the parameters that need not be loaded.
    """
    lent = set()
    for path, linear in _linear(module):
        name = f"{path}.weight"
        origin = origin_of(prefix + name, origins)
        if origin.converter is None:
            ((on_disk, _),) = origin.tensors
            rows = partial(matrix_rows, weights, on_disk)
            linear.forward = partial(_forward, linear, rows)  # type: ignore[method-assign]
            lent.add(name)
    return lent


def take_back(module: nn.Module) -> None:
    """Restore the original forward methods of the linear layers."""
    for _, linear in _linear(module):
        vars(linear).pop("forward", None)


def matrix_rows(weights: Weights, name: str) -> Iterator[Tensor]:
    """Yield a matrix [r, c] in fp32 as blocks of rows; a block may overwrite the one before it.

    Allocating new memory for each block would fragment the heap.
    """
    if isinstance(weights, HeldWeights):
        yield from weights.matrix_rows(name)
        return
    matrix = weights(name)
    blocks = torch.split(matrix, rows_at_once(matrix.shape[1]))
    if matrix.dtype == torch.float32:
        yield from blocks
        return
    scratch = torch.empty(blocks[0].shape)
    yield from (scratch[: len(block)].copy_(block) for block in blocks)


def _forward(linear: nn.Linear, rows: Callable[[], Iterable[Tensor]], x: Tensor) -> Tensor:
    """Return x [..., c] times the matrix, plus the layer's bias: [..., r]."""
    found, first = [], 0
    for block in rows():
        last = first + len(block)
        bias = None if linear.bias is None else linear.bias[first:last]
        found.append(nn.functional.linear(x, block, bias))
        first = last
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _linear(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers in a module, but no subclasses of nn.Linear: they may use the weight in another way."""
    yield from ((path, each) for path, each in module.named_modules() if type(each) is nn.Linear)
