"""Modules that replace others in transformers' model to run only a part of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Unnormed(nn.Identity):
    """A replacement for the last norm that returns its input; it has a dtype, because a decoder may read it."""

    weight = torch.zeros(())


class Skipped(nn.Module):
    """A replacement for a layer that is not run; it has the attributes that the decoder reads from a layer."""

    def __init__(self, layer: nn.Module, carry: int) -> None:
        super().__init__()
        self.carry = carry
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *args[:1]) if self.carry else hidden_states


class Blocks(nn.Module):
    """An LM head whose rows [vocab, d] come in blocks: in fp32 all rows may take gigabytes."""

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
