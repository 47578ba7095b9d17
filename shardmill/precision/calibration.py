"""What the original model makes of a calibration text at the edges of parts, so that every part can start at once.

Windows of the text's first half are what quantisers see; windows of its second half are held out from them, and by
these the search chooses. Neither may be text that quality is reported on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardmill.precision.original import Original

SEEN, HELD = "seen", "held"


@dataclass(frozen=True)
class Edges:
    """Hidden states of windows before a layer (or after the last), [n, d] for each window."""

    seen: list[Tensor]
    held: list[Tensor]


def write_edges(
    model: Original, seen: Sequence[Sequence[int]], held: Sequence[Sequence[int]], wanted: Collection[int], to: Path
) -> None:
    """Runs the original model over windows of one length and keeps its states before some layers.

    Args:
        model: the original.
        seen: tokens of the windows that quantisers see.
        held: tokens of those that are held out.
        wanted: indices of layers, or their number for the states after the last.
        to: a safetensors file to write: seen_I and held_I [windows, n, d] for each index I.
    """
    last, found = max(wanted), dict[str, Tensor]()
    for name, cut in ((SEEN, seen), (HELD, held)):
        states = [model.reference.first(window, lambda ids: model.table[ids], model.weights) for window in cut]
        for index in range(last + 1):
            if index in wanted:
                found[f"{name}_{index}"] = torch.stack(states)
            if index < last:
                states = [model.reference.layers(one, [index], model.weights)[0] for one in states]
    save_file(found, to)


def read_edges(file: Path, index: int) -> Edges:
    """The states before a layer."""
    with safe_open(file, framework="pt") as states:
        return Edges(*(list(states.get_tensor(f"{name}_{index}")) for name in (SEEN, HELD)))
