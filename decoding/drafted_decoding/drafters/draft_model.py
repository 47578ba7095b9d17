"""Drafts from a second, smaller model with the same vocabulary, in a separate session.

The session's cache contains its drafts. After the target's answer, the cache is truncated to the accepted tokens. The
next proposal feeds only the missing tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drafted_decoding.drafters.base import EMPTY, PLAIN, Draft, RequestInfo
from drafted_decoding.engine import DecodeError, Logits
from drafted_decoding.sampler import Probabilities, Sampling, draw, probabilities, uniforms
from drafted_decoding.session import Session

_STREAM = 1  # of the request's random streams; the target draws from stream 0


class DraftModelDrafter:
    """A drafter that proposes a small model's continuation: the argmax, or a draw with its distribution.

    Args:
        session: a session on the draft model's engine, used only by this drafter.
        vocab: the target's vocabulary.
        ids: the token of each of a row's logits; None if a row has a logit for every token.

    Raises:
        DecodeError: the two vocabularies differ in size.
    """

    name = "draft_model"

    def __init__(self, session: Session, *, vocab: int, ids: NDArray[np.int64] | None = None) -> None:
        if session.engine.vocab != vocab:
            raise DecodeError(
                f"the draft model has {session.engine.vocab} tokens, the model {vocab}: they must share a tokenizer"
            )
        self._session, self._vocab, self._ids = session, vocab, ids
        self._sampling = Sampling()
        self._fresh = True  # the cache may contain another request's tokens
        self._proposed_at: int | None = None  # length of the context at the last proposal, until `observe`

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """See `Drafter`."""
        self._sampling = Sampling(temperature=info.temperature, seed=info.seed)
        self._fresh = True
        self._proposed_at = None

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`. The draft is empty if the draft model's context is full."""
        if limit < 1 or not self._session.can_hold(len(context)):
            return EMPTY
        row = self._catch_up(context)
        self._proposed_at = len(context)
        limit = min(limit, 1 + self._session.undoable())
        tokens, stated, drawn_from = list[int](), list[float](), list[Probabilities]()
        while True:
            if self._sampling.greedy:
                index = int(np.argmax(row))
                # All that is read of a softmax, without making it: a whole row in float64 takes milliseconds.
                stated.append(float(1 / np.exp(row - row[index]).sum(dtype=np.float64)))
            else:
                drawn_from.append(self._probabilities(row))
                index = draw(drawn_from[-1], uniforms(self._sampling.seed, len(context) + len(tokens), _STREAM, 1)[0])
            tokens.append(index if self._ids is None else int(self._ids[index]))
            if len(tokens) == limit:
                break
            row = self._session.feed(tokens[-1:])[0]
            self._session.commit(1)
        if self._sampling.greedy:
            return Draft(tuple(tokens), tuple(stated))
        return Draft(tuple(tokens), distributions=np.stack([self._of_every_token(q) for q in drawn_from]))

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """Truncate the cache to the tokens that the target accepted."""
        if self._proposed_at is not None:
            length = min(self._proposed_at + accepted, len(self._session.tokens))
            self._session.truncate(length)
            self._proposed_at = None

    def finish(self) -> None:
        """See `Drafter`."""

    def _catch_up(self, context: Sequence[int]) -> Logits:
        """Run the tokens that the cache lacks and return the logits [V] after `context`."""
        length = len(self._session.tokens)
        if self._fresh or not 0 < length < len(context):
            self._fresh = False
            return self._session.prefill(context).row
        while length < len(context):
            count = min(self._session.room(), len(context) - length)
            rows = self._session.feed(context[length : length + count])
            self._session.commit(count)
            length += count
        row: Logits = rows[-1]
        return row

    def _probabilities(self, row: Logits) -> Probabilities:
        """Return the distribution over a row's tokens from which a draw is made."""
        return probabilities(row.astype(np.float64), Sampling(temperature=self._sampling.temperature))

    def _of_every_token(self, probs: Probabilities) -> Probabilities:
        """Return the distribution [V] over the target's tokens."""
        if self._ids is None:
            return probs
        every = np.zeros(self._vocab)
        every[self._ids] = probs
        return every
