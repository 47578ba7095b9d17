"""How long does it take to choose a token from a large vocabulary?

    python benchmarks/sampling.py [--vocab 200064] [--repeats 25]

"Plain" sorts all tokens by probability, as samplers do that are written down from the definitions of top-k and top-p;
"here" is shardmill/decode/sampler.py. Both turn the same random logits into a distribution or into
log-probabilities, and the exit code is 1 if the results differ in any bit. Times are milliseconds a token, the best of
--repeats. "next" is the whole choice of a token, with the random numbers of all tokens.

The logits are normally distributed. The larger their deviation, the fewer tokens share 0.9 of the probability, which
"nucleus" counts: a language model that is sure has a few, one that is lost some thousands.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.decode import Sampling
from shardmill.decode.sampler import Probabilities, Sampler, log_probabilities, nucleus, probabilities

DEVIATIONS = (8.0, 4.0, 2.5, 1.0)
FILTERS: dict[str, dict[str, Any]] = {
    "top-p 0.9": {"top_p": 0.9},
    "top-k 40": {"top_k": 40},
    "top-k 40, top-p 0.9": {"top_k": 40, "top_p": 0.9},
}
Row = NDArray[np.float32]


def plain_probabilities(logits: Probabilities, sampling: Sampling) -> Probabilities:
    """Return the distribution [V] of logits [V], by sorting all tokens for each filter."""
    exps = np.exp((logits - logits.max()) / sampling.temperature)
    probs: Probabilities = exps / exps.sum()
    if sampling.top_k:
        probs = _only(probs, np.argsort(-probs, kind="stable")[: sampling.top_k])
    if sampling.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
        probs = _only(probs, order[before < sampling.top_p])
    return probs


def plain_log_probabilities(row: Row, token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return what `log_probabilities` does, by sorting all tokens."""
    logits = row.astype(np.float64)
    logits -= logits.max()
    logs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logs, kind="stable")[:top].tolist()
    return float(logs[token]), tuple((t, float(logs[t])) for t in best)


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=200_064)
    parser.add_argument("--repeats", type=int, default=25)
    asked = parser.parse_args()
    rng, same = np.random.default_rng(0), True
    print(f"{'logits':>8}  {'nucleus':>8}  {'what':<22}{'plain':>8}{'here':>8}{'times':>7}{'next':>8}")
    for deviation in DEVIATIONS:
        row = (deviation * rng.normal(size=asked.vocab)).astype(np.float32)
        logits = row.astype(np.float64)
        held = int(nucleus(plain_probabilities(logits, Sampling(temperature=1.0)), 0.9).sum())
        start = f"{deviation:>8}  {held:>8}  "
        for name, settings in FILTERS.items():
            sampling = Sampling(temperature=1.0, **settings)
            same &= np.array_equal(plain_probabilities(logits, sampling), probabilities(logits, sampling))
            before = _best(asked.repeats, lambda: plain_probabilities(logits, sampling))  # noqa: B023
            now = _best(asked.repeats, lambda: probabilities(logits, sampling))  # noqa: B023
            sampler = Sampler(sampling, [0], asked.vocab)
            whole = _best(asked.repeats, lambda: sampler.next(row))  # noqa: B023
            print(f"{start}{name:<22}{before:>8.2f}{now:>8.2f}{before / now:>7.1f}{whole:>8.2f}")
        for top in (0, 20):
            same &= plain_log_probabilities(row, 7, top) == log_probabilities(row, 7, top)
            before = _best(asked.repeats, lambda: plain_log_probabilities(row, 7, top))  # noqa: B023
            now = _best(asked.repeats, lambda: log_probabilities(row, 7, top))  # noqa: B023
            print(f"{start}{f'logprobs, top {top}':<22}{before:>8.2f}{now:>8.2f}{before / now:>7.1f}")
    if not same:
        print("the results differ", file=sys.stderr)
    return 0 if same else 1


def _only(probs: Probabilities, kept: NDArray[np.intp]) -> Probabilities:
    mask = np.zeros(len(probs), dtype=np.bool_)
    mask[kept] = True
    left = np.where(mask, probs, 0.0)
    scaled: Probabilities = left / left.sum()
    return scaled


def _best(repeats: int, work: Callable[[], object]) -> float:
    """Return the least milliseconds that `work` took."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return 1000 * min(found)


if __name__ == "__main__":
    sys.exit(main())
