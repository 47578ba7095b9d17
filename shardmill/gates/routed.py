"""Which experts transformers' model takes, seen where it calls them; and what it does where others are taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LAYER = re.compile(r"layers\.(\d+)\..*\bexperts$")


@dataclass(frozen=True)
class Call:
    """What a layer's experts are called with."""

    hidden: Tensor  # [n, d]
    index: Tensor  # [n, chosen]; one over the last expert's stands for none
    weights: Tensor  # [n, chosen]

    def share(self, start: int, end: int) -> Tensor:
        """The weights of experts [start, end), [n, end - start]: 0 where a token does not take one."""
        dense = torch.zeros(len(self.index), max(end, int(self.index.max()) + 1))
        return dense.scatter_add(1, self.index, self.weights.float())[:, start:end]


Choice = Callable[[Call], tuple[Tensor, Tensor]]  # what the experts are called with -> other indices and weights


def none_taken(call: Call) -> tuple[Tensor, Tensor]:
    """A choice whose experts give nothing."""
    return call.index, call.weights * 0


def taken_in_turn(start: int, end: int) -> Choice:
    """A choice among experts [start, end) only, in which all of them have their turn, with different weights."""

    def choice(call: Call) -> tuple[Tensor, Tensor]:
        n, taken = len(call.index), min(call.index.shape[1], end - start)
        places = torch.arange(n)[:, None] * taken + torch.arange(taken)
        weights = (1 + torch.arange(n)[:, None] % 3) / 4 * 2.0 ** -torch.arange(taken)  # each exact in fp16
        return start + places % (end - start), weights

    return choice


@contextmanager
def choosing(model: nn.Module, layer: int, choice: Choice) -> Iterator[list[Call]]:
    """Lets a layer's experts take `choice` in place of the router's; collects what the router calls them with."""
    calls: list[Call] = []
    (experts,) = (module for number, module in _experts(model) if number == layer)
    forward = experts.forward

    def chosen(*args: Any, **kwargs: Any) -> Any:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        index, weights = _choice(args, kwargs)
        calls.append(Call(hidden.flatten(0, -2), index, weights))
        others = dict(zip((id(index), id(weights)), choice(calls[-1]), strict=True))
        return forward(*(others.get(id(v), v) for v in args), **{k: others.get(id(v), v) for k, v in kwargs.items()})

    experts.forward = chosen
    try:
        yield calls
    finally:
        del experts.forward  # the class's own shows again


def _experts(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """The experts of each layer that has some."""
    for name, module in model.named_modules():
        if (match := LAYER.search(name)) and not isinstance(module, nn.ModuleList):
            yield int(match[1]), module


def _choice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The indices and the weights among what experts are called with."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    index = next(value for value in tensors if not value.is_floating_point())
    return index, next(value for value in tensors if value.is_floating_point() and value.shape == index.shape)


@contextmanager
def observed(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Collects, by layer, [n, chosen] indices of the experts that transformers' model takes; -1 for none."""
    found: dict[int, Tensor] = {}

    def looker(layer: int) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index, weights = _choice(args, kwargs)
            found[layer] = torch.where(weights == 0, -1, index).clone()

        return look

    hooks = [module.register_forward_pre_hook(looker(i), with_kwargs=True) for i, module in _experts(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def by_layer(found: Mapping[int, Tensor], layers: int) -> dict[str, Tensor]:
    """What `observed` found as one tensor "experts" [layers, n, chosen], -1 in layers without; none without any."""
    if not found:
        return {}
    none = torch.full_like(next(iter(found.values())), -1)
    return {"experts": torch.stack([found.get(i, none) for i in range(layers)])}
