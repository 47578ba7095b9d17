"""How a token is chosen: the distribution after temperature and filters, and the draw from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from drafted_decoding.constraint import Constraint
from drafted_decoding.engine import DecodeError, Logits

Probabilities = NDArray[np.float64]
SEEDS = 2**64
_BINS, _TRAILING = 4096, 46  # 64 bins for each power of two, as 6 bits of the fraction lead
_ROWS = 64  # of the columns in which the likeliest tokens are looked for
_ROUNDING = 1e-9  # far larger than the rounding error of a sum of probabilities
_PENALTY = 1000  # far beyond any use; a much larger or smaller value would make logits infinite


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the defaults are greedy and change nothing.

    Attributes:
        temperature: divides the logits; 0 chooses the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p.
        min_p: keep tokens at least min_p times as likely as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the text.
        presence_penalty: subtracted from the logit of each token that has been generated.
        frequency_penalty: subtracted from the logit of a token as often as it has been generated.
        seed: the same seed gives the same tokens for any drafts, unless drafts are themselves drawn at random.
        logit_bias: token -> value added to its logit.
        accept_top_p: LOSSY, off by default: also accept a drafted token that lies in the model's top-p nucleus.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    accept_top_p: float | None = None

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.temperature < float("inf"), "temperature", "at least 0 and finite"),
            (self.top_k >= 0, "top_k", "at least 0"),
            (0 < self.top_p <= 1, "top_p", "in (0, 1]"),
            (0 <= self.min_p <= 1, "min_p", "in [0, 1]"),
            (
                1 / _PENALTY <= self.repetition_penalty <= _PENALTY,
                "repetition_penalty",
                f"in [{1 / _PENALTY}, {_PENALTY}]",
            ),
            (abs(self.presence_penalty) <= _PENALTY, "presence_penalty", f"in [-{_PENALTY}, {_PENALTY}]"),
            (abs(self.frequency_penalty) <= _PENALTY, "frequency_penalty", f"in [-{_PENALTY}, {_PENALTY}]"),
            (0 <= self.seed < SEEDS, "seed", "at least 0 and less than 2**64"),
            (self.accept_top_p is None or 0 < self.accept_top_p <= 1, "accept_top_p", "in (0, 1]"),
        )
        for good, name, expected in checks:
            if not good:
                raise DecodeError(f"{name} is {getattr(self, name)}: it must be {expected}")

    def check_vocab(self, vocab: int) -> None:
        """Raise DecodeError if `logit_bias` names a token that a vocabulary of `vocab` tokens lacks."""
        stray = [t for t in self.logit_bias if not 0 <= t < vocab]
        if stray:
            raise DecodeError(f"logit_bias names token {stray[0]}: the vocabulary has {vocab}")

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is always chosen."""
        return self.temperature == 0


def adjust(
    row: NDArray[np.floating],
    seen: NDArray[np.bool_],
    sampling: Sampling,
    out: Probabilities | None = None,
    generated: Mapping[int, int] | None = None,
) -> Probabilities:
    """Return logits [V] after bias and penalties, in `out` if it is given.

    Presence and frequency are OpenAI's penalties (platform.openai.com/docs/api-reference, "Frequency and presence
    penalties"); as in vLLM they follow the repetition penalty, and the prompt does not count.

    Args:
        row: the model's logits [V].
        seen: marks [V] the tokens that the text contains.
        sampling: bias and penalties.
        out: where to write [V].
        generated: token -> how often it has been generated.
    """
    logits = np.empty(len(row)) if out is None else out
    logits[:] = row
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if sampling.repetition_penalty != 1:
        repeated = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = np.where(repeated > 0, repeated / penalty, repeated * penalty)
    for token, count in (generated or {}).items():
        logits[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    return logits


def probabilities(logits: Probabilities, sampling: Sampling, out: Probabilities | None = None) -> Probabilities:
    """Return the distribution [V] of adjusted `logits` [V], in `out` if it is given; one-hot if greedy.

    Each step works in place: for a large vocabulary, a new array takes longer than the computation.
    """
    if sampling.greedy:
        one_hot: Probabilities = np.eye(1, len(logits), int(np.argmax(logits)))[0]
        return one_hot
    probs: Probabilities = np.subtract(logits, logits.max(), out=out)
    with np.errstate(over="ignore"):  # a temperature near 0 leaves only the likeliest token
        probs /= sampling.temperature
    np.exp(probs, out=probs)
    probs /= probs.sum()
    tokens = None
    if 0 < sampling.top_k < len(probs):
        tokens = _largest(probs, sampling.top_k)
        _keep(probs, tokens)
    if sampling.top_p < 1:
        mask = nucleus(probs if tokens is None else probs[tokens], sampling.top_p)
        _keep(probs, np.flatnonzero(mask) if tokens is None else tokens[mask])
    if sampling.min_p > 0:
        _keep(probs, np.flatnonzero(probs >= sampling.min_p * probs.max()))
    return probs


def nucleus(probs: Probabilities, top_p: float) -> NDArray[np.bool_]:
    """Return the mask [V] of the smallest set of likeliest tokens whose mass reaches `top_p`.

    Sorting a large vocabulary takes tens of milliseconds. So tokens are put into bins by the leading bits of their
    probabilities, and only the bin in which the mass reaches `top_p` is sorted.
    """
    bins = probs.view(np.int64) >> _TRAILING  # the bits of positive numbers are ordered as the numbers are
    bins -= bins.max() - (_BINS - 1)
    np.maximum(bins, 0, out=bins)  # the least likely tokens share a bin
    mass = np.bincount(bins, weights=probs, minlength=_BINS)[::-1].cumsum()  # of the likeliest bins
    last = min(int(np.searchsorted(mass, top_p)), _BINS - 1)
    before = mass[last - 1] if last else np.float64(0)
    ordered = -np.sort(-probs[bins == _BINS - 1 - last])
    sums, count = before + np.cumsum(ordered), int(np.count_nonzero(bins > _BINS - 1 - last))
    if np.abs(np.append(sums, before) - top_p).min() < _ROUNDING:  # the order of the additions decides
        ordered = -np.sort(-probs)
        sums, count = np.cumsum(ordered), 0
    further = int(np.count_nonzero(sums[:-1] < top_p))
    return _down_to(probs, ordered[further], count + further + 1)


def draw(probs: Probabilities, uniform: float) -> int:
    """Return the token at `uniform` in [0, 1) of the cumulative distribution of `probs`, whose sum need not be 1."""
    cumulative = np.cumsum(probs)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(probs)[-1]))  # rounding may lead past the last possible token


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the log-probabilities [V] of logits [V]."""
    logs = logits.astype(np.float64)
    logs -= logs.max()
    logs -= np.log(np.exp(logs).sum())
    return logs


def log_probabilities(row: NDArray[np.floating], token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log-probability of `token` under logits [V], and the `top` likeliest tokens with theirs."""
    logs = log_softmax(row)
    best = _largest(logs, top)
    best = best[np.argsort(-logs[best], kind="stable")]
    return float(logs[token]), tuple((int(t), float(logs[t])) for t in best)


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` largest of values [V], or of all if there are fewer; ties go to the first.

    Selecting among a large vocabulary takes milliseconds. So values are put into columns. `count` columns have a value
    that is at least the count-th largest maximum of a column, so whatever is smaller is left out before the selection.
    """
    if count >= len(values):
        return np.arange(len(values))
    if count == 0:
        return np.empty(0, np.intp)
    columns, bound = len(values) // _ROWS, -np.inf
    if columns >= count:
        maxima = values[: columns * _ROWS].reshape(_ROWS, columns).max(axis=0)
        bound = np.partition(maxima, -count)[-count]
    tokens = np.flatnonzero(values >= bound)
    some = values[tokens]
    return tokens[_down_to(some, np.partition(some, -count)[-count], count)]


def _down_to(values: NDArray[np.float64], least: np.float64, count: int) -> NDArray[np.bool_]:
    """Return the mask [V] of the `count` largest values, whose smallest is `least`; ties go to the first."""
    mask: NDArray[np.bool_] = values > least
    mask[np.flatnonzero(values == least)[: count - np.count_nonzero(mask)]] = True
    return mask


def _keep(probs: Probabilities, tokens: NDArray[np.intp]) -> None:
    """Set the entries of `probs` [V] to 0 except at `tokens`, whose entries are scaled to a sum of 1."""
    values = probs[tokens]
    probs.fill(0)
    probs[tokens] = values
    probs[tokens] = values / probs.sum()  # the sum of all entries, zeros too: a sum rounds by where its numbers stand


_RACE = 2  # of the request's random streams; rejection draws from 0, the draft model from 1
_LEAST = 2.0**-54  # counts instead of the number 0, whose token would not wait at all and beat any other


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
        self._numbers, self._bounds, self._logits = np.empty((3, vocab))  # reused: allocating takes longer than drawing
        self._index = 0
        self._generated: dict[int, int] | None = {} if sampling.presence_penalty or sampling.frequency_penalty else None

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
            scores = np.log(self._race(scores)[1]) * self._sampling.temperature
        if len(scores) == 1:
            return float("inf")
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
        logits = adjust(row, self._seen, self._sampling, self._logits, self._generated)
        if self._constraint is not None:
            logits[~self._constraint.allowed()] = -np.inf
        return logits

    def _pick(self, logits: Probabilities) -> int:
        if self._sampling.greedy:
            return int(np.argmax(logits))
        tokens, speeds = self._race(logits)
        return int(tokens[np.argmax(speeds)])

    def _race(self, logits: Probabilities) -> tuple[NDArray[np.intp], Probabilities]:
        """Return tokens [n] and their speeds [n]; the two fastest tokens are among them. `logits` are spent.

        A token's speed is its probability by an exponential variable, and the fastest token is drawn. The variable is
        -log(1 - u), where u is the token's own number of the stream. So a runtime need compute nothing for tokens that
        filters have removed. The last bit of a logarithm differs between libraries. This changes the draw only if the
        speeds of two tokens are as near to each other.

        The logarithms of all tokens would take long. The variable is at least u, so the speed of a token with
        probability p is at most p / u. By this bound most tokens are slower than two tokens whose speeds are computed.
        """
        probs = probabilities(logits, self._sampling, logits)
        numbers, bounds = self._numbers, self._bounds
        _generator(self._sampling.seed, self._index, _RACE).random(out=numbers)
        np.maximum(numbers, _LEAST, out=numbers)
        np.divide(probs, numbers, out=bounds)

        def speeds(tokens: NDArray[np.intp]) -> Probabilities:
            waits = np.maximum(-np.log(1 - numbers[tokens]), numbers[tokens])
            rates: Probabilities = probs[tokens] / waits
            return rates

        first = np.argmax(bounds)
        highest, bounds[first] = bounds[first], 0
        second = np.argmax(bounds)
        bounds[first] = highest
        least = max(speeds(np.array([first, second])).min(), np.finfo(np.float64).tiny)
        tokens = np.flatnonzero(bounds >= least)
        return tokens, speeds(tokens)

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
        if self._generated is not None:
            self._generated[token] = self._generated.get(token, 0) + 1
        if self._constraint is not None:
            self._constraint.advance(token)
        return token
