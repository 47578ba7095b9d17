"""The interface that decoding needs from a model: one call that runs tokens and returns logits.

Visibility rule: token t of a call sees slot s if and only if s has been written with a position <= positions[t] and has
not been reset or forgotten since. Writes of the same call count. With append-only positions a rejected draft's slots
are therefore hidden until they are overwritten, and nothing is ever rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

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

    Optional members:

    - `write`: like `forward`, but without logits, for passes whose logits nobody needs.
    - `rewindable`: returns whether a call can start at a given position, if it can't at every earlier one.
    - `undoable`: returns how many tokens fed one by one from a given position on can be undone; None if any number.
    - `verify`: the most tokens of a decode pass, if wider calls are for prompts.
    - `pads`: True if wider calls may have fewer tokens than a width, and must have only tokens that are kept.
    - `fit`: called with the number of slots that a text needs from now on; the engine may forget the others.
    - `renew`: called after a result that is not finite; the engine makes its states anew, since no mask hides NaN.
    - `labels` and `forward_labels`: some tokens, and the same as `forward` with only their logits, in their order:
      [T, labels].
    - `copy_bytes`, `copy_out`, `copy_in`, `drop_copies`, `save_copies`, `load_copies`: see `Copying`.
    - `adapt`: called with the name of an adapter to compute with from now on, or with None for the bare model. It
      returns a text that tells these weights from others; the text is empty for the bare model.
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

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Logits:
        """Write each token's key and value into its slot and return float32 logits [T, V]."""

    def forget(self, slots: Sequence[int]) -> None:
        """Hide slots until they are written again. Only a sliding context calls it."""

    def reset(self) -> None:
        """Forget every slot."""


@runtime_checkable
class Copying(Protocol):
    """The members of an engine that can copy what its slots hold, and write the copies back later.

    A position must have the slot of its number. Some models also keep what has no slot for each position, such as the
    rings of sliding layers: the rest. It belongs to one length of a text, and only a copy of that length has it.
    """

    def copy_bytes(self) -> tuple[int, int]:
        """Return about how many bytes a copy takes for each position, and for the rest; 0 if there is no rest."""

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


def decode_widths(engine: Engine) -> tuple[int, ...]:
    """Return the widths that a decode pass may have, ascending; wider calls are for prompts.

    Raises:
        DecodeError: the widths do not include 1.
    """
    widths = sorted(set(engine.widths))
    if not widths or widths[0] != 1:
        raise DecodeError(f"the engine's widths {list(engine.widths)} lack 1: decoding needs single-token calls")
    verify = max(1, getattr(engine, "verify", widths[-1]))
    return tuple(width for width in widths if width <= verify)
