"""Which experts transformers' model takes, seen where it calls them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LAYER = re.compile(r"layers\.(\d+)\..*\bexperts$")


@contextmanager
def observed(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Collects, by layer, [n, chosen] indices of the experts that transformers' model takes; -1 for none."""
    found: dict[int, Tensor] = {}

    def looker(layer: int) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            index = next(value for value in tensors if not value.is_floating_point())
            weights = next(value for value in tensors if value.is_floating_point() and value.shape == index.shape)
            found[layer] = torch.where(weights == 0, -1, index).clone()

        return look

    hooks = [
        module.register_forward_pre_hook(looker(int(match[1])), with_kwargs=True)
        for name, module in model.named_modules()
        if (match := LAYER.search(name)) and not isinstance(module, nn.ModuleList)
    ]
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
