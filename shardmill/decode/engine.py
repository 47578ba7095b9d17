"""What decoding asks of a model: one call that runs tokens through it and gives logits.

Visibility rule: token t of a call sees slot s if and only if s was written, by this or an earlier call
since `reset` and not forgotten since, with a position <= positions[t]. With append-only positions a
rejected draft's slots are therefore hidden until they are overwritten, and nothing is ever rolled back.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardmill.decode.errors import DecodeError

Logits = NDArray[np.float32]


class Engine(Protocol):
    """A causal language model with `slots` KV slots that accepts only calls of one of the `widths`.

    It may also have a method `write` like `forward`, but without logits, for passes whose logits nobody needs; if a
    call can't start at every earlier position, a method `rewindable` that tells whether it can start at one; a number
    `verify`, the most tokens of a decode pass, where wider calls are for prompts; and, if it can do with fewer slots
    for a while, a method `fit` that is told how many a text needs from now on, and may forget the others.
    """

    @property
    def slots(self) -> int:
        """Number of KV slots S."""

    @property
    def vocab(self) -> int:
        """Vocabulary size V."""

    @property
    def widths(self) -> Sequence[int]:
        """Token counts a call may have; 1 is one of them."""

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Logits:
        """Writes each token's key and value into its slot and returns float32 logits [T, V]."""

    def forget(self, slots: Sequence[int]) -> None:
        """Hides slots until they are written again. Only a sliding context calls it."""

    def reset(self) -> None:
        """Forgets every slot."""


def decode_widths(engine: Engine) -> tuple[int, ...]:
    """Token counts that a decode pass may have, ascending: those that are not for prompts alone.

    Raises:
        DecodeError: 1 is none of them.
    """
    widths = sorted(set(engine.widths))
    if not widths or widths[0] != 1:
        raise DecodeError(f"the engine's widths {list(engine.widths)} lack 1: decoding needs single-token calls")
    verify = max(1, getattr(engine, "verify", widths[-1]))
    return tuple(width for width in widths if width <= verify)
