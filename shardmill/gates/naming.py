"""The parameters of transformers' modules: their names in a checkpoint, and their values while a module runs.

For most families the names on disk are the names in memory. For others they differ: experts, for example, may be
separate tensors on disk and one stacked tensor in memory. For these families transformers has a list of renamings and
converters, which is applied here one parameter at a time.

A module is without weights until it is called. Then its parameters are loaded, except the matrices of linear layers:
they come in blocks of rows when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardmill.gates.stored import StoredWeights, WholeModel, rows_at_once

Weights = Callable[[str], Tensor]  # a tensor's name in the checkpoint -> values in any float dtype


@dataclass
class Origin:
    """The origin of a parameter: tensors of the checkpoint and a converter, or a value.

    A buffer without axes, such as the beta of an activation, is no constant of a program. Its value is the
    checkpoint's, or transformers' default if the checkpoint lacks the buffer.
    """

    converter: Any = None  # transformers' WeightConverter, or None for a tensor that is used unchanged
    tensors: list[tuple[str, str]] = field(default_factory=list)  # names on disk, each with the converter's pattern
    value: Tensor | None = None


def origins(model: nn.Module, names: Iterable[str]) -> dict[str, Origin]:
    """Map each parameter's name to its origin, given the names of a checkpoint's tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model) or []  # type: ignore[arg-type]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known: dict[str, Origin] = {}
    for name in sorted(names, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters)
        origin = known.setdefault(key, Origin(by_pattern[pattern] if pattern else None))
        origin.tensors.append((name, pattern or ""))
    return known


def _origin_of(name: str, known: Mapping[str, Origin]) -> Origin:
    """Return a parameter's origin, given the result of `origins`; a name without an entry is a name on disk."""
    return known.get(name) or Origin(tensors=[(name, "")])


def loaded(name: str, known: Mapping[str, Origin], weights: Weights) -> Tensor:
    """Return a parameter's value in fp32.

    Args:
        name: the parameter's name.
        known: the result of `origins`; a name without an entry is a name on disk.
        weights: returns the tensors on disk by name.
    """
    origin = _origin_of(name, known)
    if origin.value is not None:
        return origin.value.float()
    if origin.converter is None:
        ((on_disk, _),) = origin.tensors
        return weights(on_disk).float()
    converter = deepcopy(origin.converter)
    for on_disk, pattern in origin.tensors:
        converter.add_tensor(name, on_disk, pattern, weights(on_disk).float())
    made = converter.convert(name)[name]
    result: Tensor = made[0] if isinstance(made, list) else made
    return result


def load_parameters(module: nn.Module, prefix: str, known: Mapping[str, Origin], weights: Weights) -> None:
    """Assign a module's weights in fp32, except the matrices of linear layers, which are fetched when used.

    Args:
        module: its parameters are on the meta device.
        prefix: precedes the module's parameter names in the model's state dict.
        known: the result of `origins`.
        weights: returns the tensors on disk by name.
    """
    names = module.state_dict().keys() - lend(module, prefix, known, weights)
    parameters = {name: loaded(prefix + name, known, weights) for name in sorted(names)}
    module.load_state_dict(parameters, assign=True, strict=False)


@contextmanager
def loading(
    modules: Mapping[str, nn.Module], known: Mapping[str, Origin], weights: Weights, freed: Callable[[], None]
) -> Iterator[None]:
    """Load each module's weights when it is called, and free them after the call.

    Args:
        modules: the modules by the prefix of their parameters' names.
        known: the result of `origins`.
        weights: returns the tensors on disk by name.
        freed: is called after each call of a module.
    """

    def before(prefix: str) -> Callable[..., None]:
        return lambda module, args: load_parameters(module, prefix, known, weights)

    def after(module: nn.Module, args: Any, result: Any) -> None:
        take_back(module)
        _free_parameters(module)
        freed()

    with ExitStack() as stack:
        for prefix, module in modules.items():
            stack.callback(module.register_forward_pre_hook(before(prefix)).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield


def _free_parameters(module: nn.Module) -> None:
    """Free what a checkpoint has of a module. Other buffers stay: a layer of its own rotary table computes it once."""
    computed = [
        (each, name, each._buffers[name]) for each in module.modules() for name in each._non_persistent_buffers_set
    ]
    module.to("meta")
    for owner, name, values in computed:
        owner._buffers[name] = values


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
        origin = _origin_of(prefix + name, origins)
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
    if isinstance(weights, StoredWeights | WholeModel):
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
    outputs, first = [], 0
    for block in rows():
        last = first + len(block)
        bias = None if linear.bias is None else linear.bias[first:last]
        outputs.append(nn.functional.linear(x, block, bias))
        first = last
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _linear(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers in a module, but no subclasses of nn.Linear: they may use the weight in another way.

    A module that is itself such a layer yields none: a call takes its `forward` before the hooks of the call run.
    """
    yield from ((path, each) for path, each in module.named_modules() if path and type(each) is nn.Linear)
