"""A drafter's programs as an engine: an EAGLE-3 head, Qwen3.5's MTP layer, or Gemma 4's assistant.

A head reads a text from its second token on. At position p it is fed the token at p + 1 of the model's text, and gives
logits of the token at p + 2. Beside the token it reads what the model computed at p: its taps, or its own output at
p - 1 where the model has not been yet. An MTP layer is run like a head; its tap is the model's last hidden state.

An assistant keeps no text: models/assistant.py says what it reads.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.machine import load_programs_as
from shardmill.models.part_kinds import PART_KINDS
from shardmill.runtime.bundles import reshaping
from shardmill.runtime.engine import Engine
from shardmill.runtime.kv import Floats, KVLayout
from shardmill.runtime.manifest import of_drafter, reshape_frequency
from shardmill.runtime.program import Program


class DrafterEngine(Engine):
    """The drafter of a built model in memory; see drafted_decoding.drafters.head.

    It has logits of the tokens that it drafts alone, which may be few of the model's.
    """

    def __init__(self, manifest: Mapping[str, Any], root: Path, model: Engine) -> None:
        """Load every program of the drafter.

        Args:
            manifest: model.json's content.
            root: the folder that the manifest's paths are relative to.
            model: the model that it drafts for, which has its own slots for the same positions.
        """
        drafter = of_drafter(manifest)
        fuse, *chain = drafter["parts"]
        super().__init__({**drafter, "parts": chain}, root)
        with reshaping(reshape_frequency(manifest)):
            self.fuse = Program(root / fuse["program"]["path"], fuse, self.slots)
        self.model, self.known = model, 0
        # Whether its first program also takes the embedding and the drafter's own output.
        self.joins = PART_KINDS[fuse["kind"]].joins
        self.ids = drafted_tokens(manifest)

    def follow(self, known: int) -> None:
        """Say at how many positions the model has been: from there on the drafter reads its own output."""
        self.known = known

    def fed(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> tuple[Floats, dict[str, Floats]]:
        """See `Engine.fed`."""
        embedded = self.table[list(tokens)].T  # [d, T]
        known = positions[0] < self.known  # padding reads stale taps, and nobody reads its outputs
        if known:
            read = self.model.taps[list(slots)].astype(np.float32).T  # [n d, T]
        else:
            read = np.stack([self.last[position - 1] for position in positions], axis=1)  # [d, T]
        if self.joins:
            nothing = np.zeros_like(read)
            x = np.concatenate([embedded, *((read, nothing) if known else (nothing, read))])[None, :, :, None]
            return self.fuse({"x": x}), {}
        read = self.fuse({"x": read[None, :, :, None]})[0, :, :, 0] if known else read
        return np.concatenate([embedded, read])[None, :, :, None], {}


def drafted_tokens(manifest: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the model's token for each row of a drafter's LM head."""
    drafter = manifest["drafter"]
    if "tokens" not in drafter:
        return np.arange(drafter["vocab"])
    bits = np.frombuffer(b64decode(drafter["tokens"]), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


class AssistantEngine:
    """Gemma 4's assistant in memory; see drafted_decoding.drafters.assistant."""

    def __init__(self, manifest: Mapping[str, Any], root: Path, model: Engine) -> None:
        """Load its programs.

        Args:
            manifest: model.json's content.
            root: the folder that the manifest's paths are relative to.
            model: the model, whose caches it reads.
        """
        drafter, self.model = of_drafter(manifest), model
        with reshaping(reshape_frequency(manifest)):
            self.join, self.layers, self.head = (
                Program(root / part["program"]["path"], part, model.slots) for part in drafter["parts"]
            )
        self.layers.borrow(part.program for part in model.layers)
        self.inputs = [name for name in drafter["parts"][1]["inputs"] if name not in ("x", *self.layers.lent)]
        self.host = KVLayout(drafter)
        self.host.held, self.host.recent = model.host.held, model.host.recent  # the model's caches are read
        self.width = drafter["parts"][2]["inputs"]["hidden"][1]

    def draft(self, token: int, position: int, count: int) -> tuple[list[int], list[float]]:
        """Return at most `count` tokens to follow a token at a position, and each token's probability.

        The model's last pass must have been at the position before; otherwise nothing is drafted.
        """
        read = self.model.last.get(position - 1)
        if read is None:
            return [], []
        tokens, probabilities = list[int](), list[float]()
        inputs, output = self._given(position), np.zeros(self.width, np.float32)
        while len(tokens) < count:
            x = np.concatenate([self.model.table[[token]][0], read, output])  # [2 m + d]
            hidden = self.layers({"x": self.join({"x": x[None, :, None, None]}), **inputs})
            logits = self.head({"hidden": hidden})[0, :, 0, 0]
            token, read, output = int(logits.argmax()), np.zeros_like(read), hidden[0, :, 0, 0]
            tokens.append(token)
            probabilities.append(float(1 / np.exp(logits - logits[token], dtype=np.float64).sum()))
        return tokens, probabilities

    def _given(self, position: int) -> dict[str, Floats]:
        """Return the inputs of the layers beside the stream, which are the same in every step of a draft."""
        self.host.length = self.model.host.length
        self.layers.move(self.host.length, keep=False)
        arrays = self.host.before(position)
        return {name: arrays[name] for name in self.inputs}


def load_drafter(model: Engine) -> DrafterEngine | AssistantEngine:
    """Load the drafter of a model's build, in the model's precision."""
    kind = AssistantEngine if "lent" in model.manifest["drafter"] else DrafterEngine
    with load_programs_as(model.heads[0].precision):
        return kind(model.manifest, model.root, model)
