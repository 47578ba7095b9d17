"""What the original model makes of a calibration text at the edges of parts, so that every part can start at once.

The text's first windows are what quantisers see, the rest is held out from them: by it the search chooses. Neither may
be a text that quality is reported on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardmill.gates.naming import Weights
from shardmill.gates.reference import Reference


@dataclass(frozen=True)
class Edges:
    """Hidden states of windows before a layer (or after the last), each [n, d]."""

    seen: list[Tensor]
    held: list[Tensor]


def windows(tokens: Sequence[int], opening: Sequence[int], size: int, count: int) -> list[list[int]]:
    """The first windows of a text, none overlapping, each begun as the tokenizer begins a text.

    Args:
        tokens: of the text.
        opening: those that the tokenizer puts first.
        size: tokens of a window.
        count: how many are wanted; fewer where the text is shorter.
    """
    room = size - len(opening)
    starts = range(0, len(tokens) - room + 1, room)
    return [[*opening, *tokens[start : start + room]] for start in starts][:count]


def write_edges(
    reference: Reference, cut: Sequence[Sequence[int]], table: Tensor, weights: Weights, wanted: Sequence[int], to: Path
) -> None:
    """Runs the original model over windows of one length and keeps its states before some layers.

    Args:
        reference: transformers' model.
        cut: the windows' tokens.
        table: the embedding [vocab, d].
        weights: the original ones.
        wanted: indices of layers, or their number for the states after the last.
        to: a safetensors file to write: hidden_I [windows, n, d] for each.
    """
    last, found = max(wanted), {}
    with torch.no_grad():
        states = [reference.first(window, lambda ids: table[ids], weights) for window in cut]
        for index in range(last + 1):
            if index in wanted:
                found[f"hidden_{index}"] = torch.stack(states)
            if index < last:
                states = [reference.layers(one, [index], weights)[0] for one in states]
    save_file(found, to)


def read_edges(file: Path, index: int, held: int) -> Edges:
    """The states before a layer. Args: held how many of the windows, the last ones, are held out."""
    with safe_open(file, framework="pt") as states:
        every = list(states.get_tensor(f"hidden_{index}"))
    return Edges(every[: len(every) - held], every[len(every) - held :])
