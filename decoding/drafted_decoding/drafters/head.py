"""Drafts from the build's own EAGLE-3 head or MTP layer, which reads hidden states of the model.

The head's session holds the text from its second token on: position p stands for the hidden state of the model at p and
the token after it. A draft's further steps read the head's own output instead. Their tokens are dropped after a pass,
and the next proposal reads the hidden states that the pass has left in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from drafted_decoding.drafters.base import EMPTY, PLAIN, Draft, RequestInfo
from drafted_decoding.drafters.draft_model import DraftModelDrafter
from drafted_decoding.engine import Engine
from drafted_decoding.layout import ContextPolicy
from drafted_decoding.session import Session


class HeadEngine(Engine, Protocol):
    """An engine that runs a head; see shardmill.runtime.drafter. `forward` returns logits of the tokens `ids` only."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """Return the model's token of each of a row's logits."""

    def follow(self, known: int) -> None:
        """Say at how many positions the model has been."""


EAGLE3, MTP = "eagle3", "mtp"


class HeadDrafter(DraftModelDrafter):
    """A drafter that proposes what a head finds likely: the argmax, or a draw with its distribution.

    Args:
        head: the head's engine, used only by this drafter.
        name: EAGLE3, or MTP for an MTP layer, which its engine runs like a head.
        context_policy: the policy of the model's session, so that a position has the same slot in both.
    """

    beyond = True  # its engine reads the model's rows of these tokens, and a position is the same in both

    def __init__(self, head: HeadEngine, name: str = EAGLE3, *, context_policy: ContextPolicy = "stop") -> None:
        super().__init__(Session(head, context_policy=context_policy), vocab=head.vocab, ids=head.ids)
        self.name, self._head = name, head
        self._first: int | None = None  # the text's first token, which the session does not hold

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """See `Drafter`."""
        self.observe((), 0)  # the last request may have been abandoned in the middle of a pass
        super().reset(prompt, info)
        if prompt[0] != self._first:
            self._session.truncate(0)
            self._first = prompt[0]

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`. The draft is empty for a text of a single token."""
        if len(context) < 2:
            return EMPTY
        self._head.follow(len(context) - 1)
        return super().propose(context[1:], limit)

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """Drop what the draft's own steps have left, accepted or not."""
        super().observe(emitted, 0)
