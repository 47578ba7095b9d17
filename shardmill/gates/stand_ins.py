"""Modules that take the places of others in transformers' model, where a part of it is to run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Unnormed(nn.Identity):
    """Stands for the last norm where the last layer's outputs are wanted; a decoder may ask a norm for its dtype."""

    weight = torch.zeros(())


class Skipped(nn.Module):
    """Stands for a layer that is not run; it has what the decoder asks a layer for."""

    def __init__(self, layer: nn.Module, carry: int) -> None:
        super().__init__()
        self.carry = carry
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *args[:1]) if self.carry else hidden_states


class Blocks(nn.Module):
    """An LM head whose rows [vocab, d] come in blocks: in fp32 all of them may take gigabytes."""

    def __init__(self, rows: Iterable[Tensor], bias: Tensor | None, into: Tensor | None) -> None:
        super().__init__()
        self.rows, self.bias, self.into = rows, bias, into

    def forward(self, hidden: Tensor) -> Tensor:
        if self.into is None:
            found = torch.cat([hidden @ rows.float().T for rows in self.rows], dim=-1)
            return found if self.bias is None else found + self.bias
        first = 0
        for rows in self.rows:
            torch.mm(hidden[0], rows.float().T, out=self.into[:, first : first + len(rows)])
            first += len(rows)
        return (self.into if self.bias is None else self.into.add_(self.bias))[None]
