"""Chooses the tokens of one request, one after the other; every chosen token is emitted.

Randomness depends only on the seed and the token's index: each token of the vocabulary waits an exponential time,
scaled by its probability, and the first to arrive is drawn. So a draw is an argmax, and the last bits of the logits
matter only if two tokens arrive almost together. With cumulative sums they would matter at every edge between two
tokens.

A draft that was not drawn at random is compared with the token that would be drawn anyway. This is rejection sampling
for a certain draft: it is kept with the model's probability for it, and otherwise the token comes from the rest of the
model's distribution. A draft drawn from a distribution q is kept with probability min(1, p / q). Otherwise it is
replaced by a draw from max(p - q, 0) (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
2023). Both leave the model's distribution unchanged.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardmill.decode.constraint import Constraint
from shardmill.decode.distribution import Probabilities, Sampling, adjust, draw, nucleus, probabilities
from shardmill.decode.engine import Logits

_RACE = 2  # of the request's random streams; rejection draws from 0, the draft model from 1


def uniforms(seed: int, index: int, stream: int, count: int) -> NDArray[np.float64]:
    """Return `count` numbers in [0, 1) for the index-th token. Streams are independent of each other."""
    return _generator(seed, index, stream).random(count)


def _generator(seed: int, index: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, stream, index]))


class Sampler:
    """The state of a request's sampling: the tokens in the text, the number chosen, and the grammar's position."""

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], vocab: int, constraint: Constraint | None = None
    ) -> None:
        sampling.check_vocab(vocab)
        self._sampling = sampling
        self._constraint = constraint
        self._seen = np.zeros(vocab, dtype=np.bool_)
        self._seen[list(prompt)] = True
        self._waits, self._logits = np.empty((2, vocab))  # reused: allocating takes longer than drawing
        self._index = 0

    @property
    def finished(self) -> bool:
        """Return whether the grammar is complete, so that no token may follow."""
        return self._constraint is not None and self._constraint.finished

    def forced(self) -> Sequence[int]:
        """Return the next tokens that the grammar leaves no choice about."""
        return self._constraint.forced() if self._constraint else ()

    def valid_prefix(self, draft: Sequence[int]) -> int:
        """Return how many drafted tokens the grammar allows."""
        return self._constraint.valid_prefix(draft) if self._constraint else len(draft)

    def margin(self, row: Logits) -> float:
        """Return the least change of a logit of `row` [V] that could change the next token."""
        scores = self._adjusted(row)
        if not self._sampling.greedy:
            with np.errstate(divide="ignore"):
                scores = np.log(self._race(scores)) * self._sampling.temperature
        second, first = np.partition(scores, -2)[-2:]
        return float(first - second)

    def next(self, row: Logits) -> int:
        """Choose the next token, given the model's logits [V]."""
        logits = self._adjusted(row)
        return self._emit(self._pick(logits))

    def check(self, row: Logits, drafted: int, drawn_from: Probabilities | None) -> int:
        """Choose the next token after a proposal; the result equals `drafted` if the draft is accepted.

        Args:
            row: the model's logits [V].
            drafted: the proposed token.
            drawn_from: distribution [V] of a draft that was drawn at random; None for any other draft.
        """
        logits = self._adjusted(row)
        if self._sampling.accept_top_p is not None and self._in_nucleus(logits, drafted, self._sampling.accept_top_p):
            return self._emit(drafted)
        if drawn_from is None or self._sampling.greedy:
            return self._emit(self._pick(logits))
        return self._emit(self._reject(probabilities(logits, self._sampling), drafted, drawn_from))

    def _adjusted(self, row: Logits) -> Probabilities:
        logits = adjust(row, self._seen, self._sampling, self._logits)
        if self._constraint is not None:
            logits[~self._constraint.allowed()] = -np.inf
        return logits

    def _pick(self, logits: Probabilities) -> int:
        if self._sampling.greedy:
            return int(np.argmax(logits))
        return int(np.argmax(self._race(logits)))

    def _race(self, logits: Probabilities) -> Probabilities:
        """Return how fast each token is [V], valid until the next call; the fastest is drawn. `logits` are spent."""
        waits = self._waits
        _generator(self._sampling.seed, self._index, _RACE).standard_exponential(out=waits)
        np.maximum(waits, np.finfo(np.float64).tiny, out=waits)
        return np.divide(probabilities(logits, self._sampling, logits), waits, out=waits)

    def _reject(self, probs: Probabilities, drafted: int, drawn_from: Probabilities) -> int:
        keep, redraw = uniforms(self._sampling.seed, self._index, 0, 2)
        if keep * drawn_from[drafted] < probs[drafted]:
            return drafted
        rest = np.maximum(probs - drawn_from, 0.0)
        return draw(rest if rest.sum() > 0 else probs, redraw)

    def _in_nucleus(self, logits: Probabilities, drafted: int, top_p: float) -> bool:
        """Return whether a draft is good enough for lossy acceptance; a draft that the grammar forbids never is."""
        probs = probabilities(logits, Sampling(temperature=self._sampling.temperature or 1.0))
        return bool(nucleus(probs, top_p)[drafted] and probs[drafted] > 0)

    def _emit(self, token: int) -> int:
        self._seen[token] = True
        self._index += 1
        if self._constraint is not None:
            self._constraint.advance(token)
        return token
