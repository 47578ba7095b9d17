"""The programs of a built model as one causal language model: tokens in, logits out.

The host does what the graph contract leaves to it: embedding lookup, the arrays of a pass (models/host.py), and the
chaining of parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.machine import load_programs_as
from shardmill.models.host import Floats, Host
from shardmill.runtime.manifest import read_manifest
from shardmill.runtime.program import Program
from shardmill.runtime.table import EMBEDDING, read_tables


class Engine:
    """A built model, resident: implements the protocol of shardmill.decode.engine."""

    def __init__(self, manifest: Mapping[str, Any], root: Path) -> None:
        """Loads every program.

        Args:
            manifest: model.json's content.
            root: the folder that its paths start from.
        """
        self.slots: int = manifest["context"]
        self.vocab: int = manifest["vocab"]
        self.widths: tuple[int, ...] = tuple(manifest["widths"])
        self.tokens_max: int = manifest["tokens_max"]
        self.table = read_tables(root / manifest["embedding"]["path"])[EMBEDDING]  # [vocab, d]
        self.host = Host(manifest)
        # What a token carries beside the residual stream: channels of the first part's x that the table lacks.
        self.carry: int = manifest["parts"][0]["inputs"]["x"][1] - self.table.shape[1]
        self.layers: list[tuple[Program, list[str]]] = []  # each with the names of its inputs
        self.heads: list[Program] = []
        for part in manifest["parts"]:
            path = root / part["program"]["path"]
            if part["kind"] == "layers":
                self.layers.append((Program(path, stateful=True), list(part["inputs"])))
            else:
                self.heads.append(Program(path, stateful=False))

    @property
    def programs(self) -> list[Program]:
        """All programs in the order of a pass."""
        return [*(program for program, _ in self.layers), *self.heads]

    def reset(self) -> None:
        """Forgets every slot. What the states hold is masked until it is overwritten."""
        self.host.reset()

    def forget(self, slots: Sequence[int]) -> None:
        """Hides slots until they are written again."""
        self.host.forget(slots)

    def rewindable(self, position: int) -> bool:
        """Whether the next pass may start at a position that was passed already, or at the end."""
        return self.host.rewindable(position)

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """Writes each token's key and value into its slot and returns float32 logits [T, vocab]."""
        hidden = self.hidden(tokens, slots, positions)
        logits = [head({"hidden": hidden})[0, :, :, 0] for head in self.heads]  # each [V_j, T]
        return np.concatenate(logits).T

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        """`forward` without the logits: the LM head does not run."""
        self.hidden(tokens, slots, positions)

    def hidden(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """The last layer's output [1, d, T, 1]."""
        x = self.table[list(tokens)].T[None, :, :, None]  # [1, d, T, 1]
        x = np.concatenate([x, np.zeros((1, self.carry, len(tokens), 1), np.float32)], axis=1) if self.carry else x
        given = self.host.arrays(slots, positions)
        for program, names in self.layers:
            given["x"] = x
            x = program({name: given[name] for name in names})
        return x


def load(build: Path, precision: str = "fp16") -> Engine:
    """The engine of a finished build folder.

    Args:
        build: the folder.
        precision: the portable engine's, "fp16" as the Neural Engine computes or "fp32"; Core ML has no choice.

    Raises:
        ShardmillError: where the folder holds no finished build.
    """
    manifest = read_manifest(build)
    with load_programs_as(precision):
        return Engine(manifest, build)
