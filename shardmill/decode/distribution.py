"""Turns logits into the distribution of the next token.

Order: logit bias, repetition penalty, temperature, top-k, top-p, min-p, as in transformers. Temperature 0 is greedy:
the filters then change nothing and the argmax of the adjusted logits is chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardmill.decode.errors import DecodeError

Probabilities = NDArray[np.float64]
SEEDS = 2**64
_BINS, _TRAILING = 4096, 46  # 64 bins for each power of two, as 6 bits of the fraction lead
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
        seed: the same seed gives the same tokens for any drafts, unless drafts are themselves drawn at random.
        logit_bias: token -> value added to its logit.
        accept_top_p: LOSSY, off by default: also accept a drafted token that lies in the model's top-p nucleus.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
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
    row: NDArray[np.floating], seen: NDArray[np.bool_], sampling: Sampling, out: Probabilities | None = None
) -> Probabilities:
    """Return logits [V] after bias and repetition penalty, in `out` if it is given.

    `seen` [V] marks the tokens that the text contains.
    """
    logits = np.empty(len(row)) if out is None else out
    logits[:] = row
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if sampling.repetition_penalty != 1:
        held = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = np.where(held > 0, held / penalty, held * penalty)
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
    if 0 < sampling.top_k < len(probs):
        _keep(probs, _largest(probs, sampling.top_k))
    if sampling.top_p < 1:
        _keep(probs, nucleus(probs, sampling.top_p))
    if sampling.min_p > 0:
        _keep(probs, probs >= sampling.min_p * probs.max())
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


def log_probabilities(row: NDArray[np.floating], token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log-probability of `token` under logits [V], and the `top` likeliest tokens with theirs."""
    logits = row.astype(np.float64)
    logits -= logits.max()
    logs = logits - np.log(np.exp(logits).sum())
    best = np.flatnonzero(_largest(logs, top)) if top else np.empty(0, np.intp)
    best = best[np.argsort(-logs[best], kind="stable")]
    return float(logs[token]), tuple((int(t), float(logs[t])) for t in best)


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """Return the mask [V] of the `count` largest values, or of all if there are fewer; ties go to the first."""
    if count >= len(values):
        return np.ones(len(values), dtype=np.bool_)
    return _down_to(values, np.partition(values, -count)[-count], count)


def _down_to(values: NDArray[np.float64], least: np.float64, count: int) -> NDArray[np.bool_]:
    """Return the mask [V] of the `count` largest values, whose smallest is `least`; ties go to the first."""
    mask: NDArray[np.bool_] = values > least
    mask[np.flatnonzero(values == least)[: count - np.count_nonzero(mask)]] = True
    return mask


def _keep(probs: Probabilities, mask: NDArray[np.bool_]) -> None:
    """Set all entries of `probs` [V] outside `mask` to 0, and scale the rest to a sum of 1."""
    probs *= mask
    probs /= probs.sum()
