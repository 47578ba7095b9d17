"""Replacements for pieces of transformers' models: layers that do not run, few rows of a table, a head in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MATRIX = 2  # axes


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
            logits = torch.cat([hidden @ rows.float().T for rows in self.rows], dim=-1)
            return logits if self.bias is None else logits + self.bias
        first = 0
        for rows in self.rows:
            torch.mm(hidden[0], rows.float().T, out=self.into[:, first : first + len(rows)])
            first += len(rows)
        return (self.into if self.bias is None else self.into.add_(self.bias))[None]


@contextmanager
def embedded_rows(embed: nn.Module, tokens: Tensor, table: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Give a model an embedding table of the tokens that occur; yield the tokens' indices in this table."""
    ids, places = torch.unique(tokens, return_inverse=True)
    rows = nn.Parameter(table(ids).float(), requires_grad=False)
    with replaced(embed, "weight", rows), replaced(embed, "padding_idx", None):
        yield places


@contextmanager
def without_weights() -> Iterator[None]:
    """Build modules in this context with parameters on the meta device, but real buffers."""
    register = nn.Module.register_parameter

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        meta = None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, meta)

    nn.Module.register_parameter = empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute's value within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def at_length(forward: Callable[..., Any], context: int) -> Callable[..., Any]:
    """Return a rotary module's forward that computes as for a sequence of `context` tokens, even if fewer are fed.

    The last position of the sequence is appended to the positions fed, since only the largest position decides
    transformers' factors (dynamic_rope_update, longrope_frequency_update). Tables of the whole context would take most
    of a layer's time if the context is long.
    """

    def longer(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        # [1, n], or [3, 1, n] for a table of three axes of positions
        fed = position_ids if position_ids.ndim > MATRIX else position_ids[:1]
        last = torch.full((*fed.shape[:-1], 1), context - 1, dtype=fed.dtype)
        tables = forward(x, torch.cat([fed, last], dim=-1), *args, **kwargs)
        return tuple(table[:, :-1] for table in tables)

    return longer
