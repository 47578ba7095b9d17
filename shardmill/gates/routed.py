"""Observes which experts transformers' model is routed to, and replaces its choice by another."""

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
    """The arguments of a call of a layer's experts."""

    hidden: Tensor  # [n, d]
    index: Tensor  # [n, chosen]; the index after the last expert stands for no expert
    weights: Tensor  # [n, chosen]

    def share(self, start: int, end: int) -> Tensor:
        """Return the weights of experts [start, end), [n, end - start]: 0 if a token is not routed to the expert."""
        dense = torch.zeros(len(self.index), max(end, int(self.index.max()) + 1))
        return dense.scatter_add(1, self.index, self.weights.float())[:, start:end]


Choice = Callable[[Call], tuple[Tensor, Tensor]]  # the experts' arguments -> other indices and weights


def none_taken(call: Call) -> tuple[Tensor, Tensor]:
    """Return a call's experts with weights of 0, so that they contribute nothing."""
    return call.index, call.weights * 0


def taken_in_turn(start: int, end: int) -> Choice:
    """Return a choice that uses experts [start, end) only, each in turn, with different weights."""

    def choice(call: Call) -> tuple[Tensor, Tensor]:
        n, taken = len(call.index), min(call.index.shape[1], end - start)
        places = torch.arange(n)[:, None] * taken + torch.arange(taken)
        weights = (1 + torch.arange(n)[:, None] % 3) / 4 * 2.0 ** -torch.arange(taken)  # each exact in fp16
        return start + places % (end - start), weights

    return choice


@contextmanager
def choosing(model: nn.Module, layer: int, choice: Choice, fed: Tensor | None = None) -> Iterator[list[Call]]:
    """Replace the router's choice in a layer by `choice`; yield a list that collects the router's own calls.

    Args:
        model: transformers' model.
        layer: the layer's number.
        choice: the other choice.
        fed: [n, d], what the experts read in place of their input, if anything.
    """
    calls: list[Call] = []
    (experts,) = (module for number, module in _experts(model) if number == layer)
    forward = experts.forward

    def chosen(*args: Any, **kwargs: Any) -> Any:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        index, weights = _choice(args, kwargs)
        calls.append(Call(hidden.flatten(0, -2), index, weights))
        others = dict(zip((id(index), id(weights)), choice(calls[-1]), strict=True))
        if fed is not None:
            others[id(hidden)] = fed.reshape(hidden.shape)
        return forward(*(others.get(id(v), v) for v in args), **{k: others.get(id(v), v) for k, v in kwargs.items()})

    experts.forward = chosen
    try:
        yield calls
    finally:
        del experts.forward  # restores the class's own forward


def _experts(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the number and the experts module of each layer with experts."""
    for name, module in model.named_modules():
        if (match := LAYER.search(name)) and not isinstance(module, nn.ModuleList):
            yield int(match[1]), module


def _choice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the indices and the weights among the experts' arguments."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    index = next(value for value in tensors if not value.is_floating_point())
    return index, next(value for value in tensors if value.is_floating_point() and value.shape == index.shape)


@contextmanager
def observed(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Collect the experts that transformers' model is routed to, indices [n, chosen] by layer; -1 for no expert."""
    indices: dict[int, Tensor] = {}

    def looker(layer: int) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index, weights = _choice(args, kwargs)
            indices[layer] = torch.where(weights == 0, -1, index).clone()

        return look

    hooks = [module.register_forward_pre_hook(looker(i), with_kwargs=True) for i, module in _experts(model)]
    try:
        yield indices
    finally:
        for hook in hooks:
            hook.remove()


def by_layer(indices: Mapping[int, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the result of `observed` as one tensor "experts" [layers, n, chosen], or {} if no layer has experts.

    Layers without experts get the index -1.
    """
    if not indices:
        return {}
    none = torch.full_like(next(iter(indices.values())), -1)
    return {"experts": torch.stack([indices.get(i, none) for i in range(layers)])}
