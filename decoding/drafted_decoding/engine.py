"""The interface that decoding needs from a model: one call that runs tokens and returns logits.

Visibility rule: token t of a call sees slot s if and only if s has been written with a position <= positions[t] and has
not been reset or forgotten since. Writes of the same call count. With append-only positions a rejected draft's slots
are therefore hidden until they are overwritten, and nothing is ever rolled back.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class DecodeError(ValueError):
    """A request or a setting that decoding cannot honour."""


class NotFiniteError(DecodeError):
    """The model has computed NaN or infinity."""


class PromptTooLongError(DecodeError):
    """The prompt does not fit into the engine's KV slots."""


Logits = NDArray[np.float32]


class Engine(Protocol):
    """A causal language model with `slots` KV slots that accepts only calls of one of the `widths`.

    An engine can copy what its slots hold, and write the copies back later. A position must then have the slot of its
    number. Some models also keep what has no slot for each position, such as the rings of sliding layers: the rest. It
    belongs to one length of a text, and only a copy of that length has it.
    """

    @property
    def slots(self) -> int:
        """Return the number of KV slots S."""

    @property
    def vocab(self) -> int:
        """Return the vocabulary size V."""

    @property
    def widths(self) -> Sequence[int]:
        """Return the numbers of tokens that a call may have; they include 1."""

    @property
    def beyond(self) -> bool:
        """Return whether the engine takes tokens beyond the vocabulary in a prompt.

        They name vectors that it was given, such as the rows of a picture, and stand for nothing else: two that differ
        are never the same token. The engine raises an exception for one that it does not know. It has no logits of
        them, so none is ever generated.
        """

    @property
    def verify(self) -> int:
        """Return the most tokens of a decode pass; wider calls are for prompts."""

    @property
    def pads(self) -> bool:
        """Return whether wider calls may have fewer tokens than a width, and must have only tokens that are kept."""

    @property
    def labels(self) -> Sequence[int]:
        """Return the tokens whose logits `forward_labels` returns; empty if it can't be called."""

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Logits:
        """Write each token's key and value into its slot and return float32 logits [T, V]."""

    def forward_labels(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Logits:
        """Do the same as `forward` with the logits of `labels` only, in their order: [T, labels]."""

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> object:
        """Do the same as `forward` for a pass whose logits nobody needs."""

    def forget(self, slots: Sequence[int]) -> None:
        """Hide slots until they are written again. Only a sliding context calls it."""

    def reset(self) -> None:
        """Forget every slot."""

    def renew(self) -> None:
        """Forget every slot and make the states anew after a result that is not finite, since no mask hides NaN."""

    def fit(self, slots: int) -> None:
        """Take note that a text needs so many slots from now on; the engine may forget the others."""

    def rewindable(self, position: int) -> bool:
        """Return whether the next call may start at a position; most engines may at every earlier one."""

    def undoable(self, position: int) -> int | None:
        """Return how many tokens fed one by one from a position on can be undone; None if any number."""

    def adapt(self, name: str | None) -> str:
        """Compute with an adapter from now on, or with the bare model for None.

        Returns a text that tells these weights from others; it is empty for the bare model. Raises any exception if it
        can't; the adapter before then stays.
        """

    def copy_bytes(self) -> tuple[int, int]:
        """Return about how many bytes a copy takes for each position, and for the rest.

        0 for the rest if there is none; 0 for both if the engine makes no copies.
        """

    def copy_out(self, spans: Mapping[int, tuple[int, int]], rest: int | None = None) -> dict[int, int]:
        """Copy the positions [start, stop) for each key, and for the key `rest` also the rest; return bytes by key."""

    def copy_in(self, keys: Sequence[int]) -> None:
        """Write copies back in this order."""

    def drop_copies(self, keys: Sequence[int]) -> None:
        """Free copies."""

    def save_copies(self, keys: Sequence[int], file: Path, tokens: Sequence[int]) -> None:
        """Write the copies of a text's tokens to a file."""

    def load_copies(self, keys: Sequence[int], file: Path, tokens: Sequence[int]) -> dict[int, int]:
        """Read copies in the order in which they were written, give them keys, and return their bytes by key.

        Raises any exception if the file is missing or damaged, or if this engine would make other copies of the tokens.
        """


class PlainEngine:
    """What most members are for an engine that is nothing but `slots`, `vocab`, `widths`, `forward`, `forget`, `reset`.

    It can start a call at every position, has one context, and makes no copies. A subclass defines these six, and
    whichever other members it has its own way for.
    """

    slots: int
    vocab: int
    widths: Sequence[int]
    beyond: bool = False
    verify: int = sys.maxsize  # no width is for prompts only
    pads: bool = False
    labels: Sequence[int] = ()

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Logits:
        raise NotImplementedError

    def forward_labels(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Logits:
        return self.forward(tokens, slots, positions)[:, list(self.labels)]

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> object:
        return self.forward(tokens, slots, positions)

    def forget(self, slots: Sequence[int]) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError

    def renew(self) -> None:
        self.reset()

    def fit(self, slots: int) -> None:
        """Do nothing: there is one context."""

    def rewindable(self, position: int) -> bool:
        """Return True."""
        return True

    def undoable(self, position: int) -> int | None:
        """Return None: any number."""
        return None

    def adapt(self, name: str | None) -> str:
        """Return the name of the bare model's weights. Raises DecodeError for an adapter."""
        if name is not None:
            raise DecodeError("the engine takes no adapters")
        return ""

    def copy_bytes(self) -> tuple[int, int]:
        """Return 0 for both: it makes no copies."""
        return 0, 0

    def copy_out(self, spans: Mapping[int, tuple[int, int]], rest: int | None = None) -> dict[int, int]:
        raise NotImplementedError

    def copy_in(self, keys: Sequence[int]) -> None:
        raise NotImplementedError

    def drop_copies(self, keys: Sequence[int]) -> None:
        raise NotImplementedError

    def save_copies(self, keys: Sequence[int], file: Path, tokens: Sequence[int]) -> None:
        raise NotImplementedError

    def load_copies(self, keys: Sequence[int], file: Path, tokens: Sequence[int]) -> dict[int, int]:
        raise NotImplementedError


def decode_widths(engine: Engine) -> tuple[int, ...]:
    """Return the widths that a decode pass may have, ascending; wider calls are for prompts.

    Raises:
        DecodeError: the widths do not include 1.
    """
    widths = sorted(set(engine.widths))
    if not widths or widths[0] != 1:
        raise DecodeError(f"the engine's widths {list(engine.widths)} lack 1: decoding needs single-token calls")
    return tuple(width for width in widths if width <= max(1, engine.verify))
