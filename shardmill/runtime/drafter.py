"""A drafter's programs as an engine: an EAGLE-3 head, which reads a text from its second token on.

At position p it is fed the token at p + 1 of the model's text, and gives logits of the token at p + 2. Beside the token
it reads what the model computed at p: its taps, or its own output at p - 1 where the model has not been yet.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.machine import load_programs_as
from shardmill.models.host import Floats
from shardmill.runtime.bundles import reshaping
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import of_drafter, reshape_frequency
from shardmill.runtime.program import Program


class DrafterEngine(Engine):
    """The drafter of a built model in memory; implements the protocol of shardmill.decode.engine."""

    def __init__(self, manifest: Mapping[str, Any], root: Path, model: Engine) -> None:
        """Load every program of the drafter.

        Args:
            manifest: model.json's content.
            root: the folder that the manifest's paths are relative to.
            model: the model that it drafts for, which has its own slots for the same positions.
        """
        own = {key: value for key, value in of_drafter(manifest).items() if key != "drafter"}
        fuse, *others = [{key: part[key] for key in part if key != "drafter"} for part in own["parts"]]
        super().__init__({**own, "parts": others}, root)
        with reshaping(reshape_frequency(manifest)):
            self.fuse = Program(root / fuse["program"]["path"], fuse, self.slots)
        self.model, self.known = model, 0
        self.tokens = drafted_tokens(manifest)
        self.last: dict[int, Floats] = {}  # the drafter's own output [d] for each position of the last pass

    def follow(self, known: int) -> None:
        """Say at how many positions the model has been: from there on the drafter reads its own output."""
        self.known = known

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """See `Engine.forward`. A token that the drafter never proposes has a logit of -inf."""
        drafted = super().forward(tokens, slots, positions)  # [T, rows]
        logits = np.full((len(drafted), self.vocab), -np.inf, np.float32)
        logits[:, self.tokens] = drafted
        return logits

    def hidden(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """See `Engine.hidden`."""
        embedded = self.table[list(tokens)].T  # [d, T]
        if positions[0] < self.known:  # padding reads stale taps, and nobody reads its outputs
            taps = self.model.taps[list(slots)].astype(np.float32).T
            read = self.fuse({"x": taps[None, :, :, None]})[0, :, :, 0]  # [d, T]
        else:
            read = np.stack([self.last[position - 1] for position in positions], axis=1)
        found = self.through(np.concatenate([embedded, read])[None, :, :, None], slots, positions)
        self.last = dict(zip(positions, found[0, :, :, 0].T, strict=True))
        return found


def drafted_tokens(manifest: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the model's token for each row of a drafter's LM head."""
    drafter = manifest["drafter"]
    if "tokens" not in drafter:
        return np.arange(drafter["vocab"])
    bits = np.frombuffer(b64decode(drafter["tokens"]), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def load_drafter(model: Engine) -> DrafterEngine:
    """Load the drafter of a model's build, in the model's precision."""
    with load_programs_as(model.heads[0].precision):
        return DrafterEngine(model.manifest, model.root, model)
