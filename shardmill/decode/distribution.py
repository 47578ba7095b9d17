"""Turns logits into the distribution that a token is drawn from.

Order: logit bias, repetition penalty, temperature, top-k, top-p, min-p, as transformers applies them.
Temperature 0 is greedy: the filters then change nothing and the adjusted argmax is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardmill.decode.errors import DecodeError

Probabilities = NDArray[np.float64]
SEEDS = 2**64
_PENALTY = 1000  # far past any use; much more, or less, would make logits infinite


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the defaults are greedy and change nothing.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p.
        min_p: keep tokens at least min_p times as likely as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the text.
        seed: the same seed gives the same tokens, whatever drafts, unless drafts are themselves drawn at random.
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
        """Whether the likeliest token is taken."""
        return self.temperature == 0


def adjust(row: NDArray[np.floating], seen: NDArray[np.bool_], sampling: Sampling) -> Probabilities:
    """Logits [V] after bias and repetition penalty. `seen` [V]: which tokens the text already holds."""
    logits = row.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if sampling.repetition_penalty != 1:
        held = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = np.where(held > 0, held / penalty, held * penalty)
    return logits


def probabilities(logits: Probabilities, sampling: Sampling) -> Probabilities:
    """Distribution [V] of adjusted `logits` [V]; one-hot when greedy."""
    if sampling.greedy:
        one_hot: Probabilities = np.eye(1, len(logits), int(np.argmax(logits)))[0]
        return one_hot
    with np.errstate(over="ignore"):  # a temperature near 0 leaves the likeliest token alone
        probs = _softmax((logits - logits.max()) / sampling.temperature)
    if 0 < sampling.top_k < len(probs):
        probs = _keep(probs, _likeliest(probs, sampling.top_k))
    if sampling.top_p < 1:
        probs = _keep(probs, nucleus(probs, sampling.top_p))
    if sampling.min_p > 0:
        probs = _keep(probs, probs >= sampling.min_p * probs.max())
    return probs


def nucleus(probs: Probabilities, top_p: float) -> NDArray[np.bool_]:
    """Mask [V] of the smallest set of likeliest tokens whose mass reaches `top_p`."""
    order = np.argsort(-probs, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])  # mass of the likelier tokens
    mask = np.zeros(len(probs), dtype=np.bool_)
    mask[order[before < top_p]] = True
    return mask


def draw(probs: Probabilities, uniform: float) -> int:
    """Token at `uniform` in [0, 1) of the cumulative distribution of `probs`, which need not sum to 1."""
    cumulative = np.cumsum(probs)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(probs)[-1]))  # rounding may point past the last possible token


def log_probabilities(row: NDArray[np.floating], token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of `token` under logits [V], and the `top` likeliest tokens with theirs."""
    logits = row.astype(np.float64)
    logits -= logits.max()
    logs = logits - np.log(np.exp(logits).sum())
    best: Sequence[int] = np.argsort(-logs, kind="stable")[:top].tolist()
    return float(logs[token]), tuple((t, float(logs[t])) for t in best)


def _likeliest(probs: Probabilities, count: int) -> NDArray[np.bool_]:
    mask = np.zeros(len(probs), dtype=np.bool_)
    mask[np.argsort(-probs, kind="stable")[:count]] = True
    return mask


def _keep(probs: Probabilities, mask: NDArray[np.bool_]) -> Probabilities:
    kept = np.where(mask, probs, 0.0)
    scaled: Probabilities = kept / kept.sum()
    return scaled


def _softmax(logits: Probabilities) -> Probabilities:
    exps = np.exp(logits - logits.max())
    scaled: Probabilities = exps / exps.sum()
    return scaled
