"""Logits become the distribution that the settings describe."""

from collections.abc import Callable

import numpy as np
import pytest
from drafted_decoding import DecodeError, Sampling
from drafted_decoding.sampler import Probabilities, adjust, draw, log_probabilities, nucleus, probabilities
from numpy.typing import NDArray

PROBS = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
LOGITS = np.log(PROBS)
NONE = np.zeros(5, dtype=np.bool_)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 1.0}, PROBS),
        ({"temperature": 0.5}, PROBS**2 / (PROBS**2).sum()),
        ({"temperature": 1.0, "top_k": 2}, np.array([4, 3, 0, 0, 0]) / 7),
        ({"temperature": 1.0, "top_k": 9}, PROBS),
        ({"temperature": 1.0, "top_p": 0.65}, np.array([4, 3, 0, 0, 0]) / 7),
        ({"temperature": 1.0, "top_p": 0.71}, np.array([4, 3, 2, 0, 0]) / 9),
        ({"temperature": 1.0, "min_p": 0.45}, np.array([4, 3, 2, 0, 0]) / 9),
        ({"temperature": 1e-310}, np.array([1, 0, 0, 0, 0])),
        ({"temperature": 0.0}, np.array([1, 0, 0, 0, 0])),
    ],
)
def test_filters(settings: dict[str, float], expected: np.ndarray) -> None:
    assert probabilities(LOGITS, Sampling(**settings)) == pytest.approx(expected)  # type: ignore[arg-type]


def test_bias_and_penalty_change_the_logits() -> None:
    row = np.array([2.0, -2.0, 1.0], dtype=np.float32)
    seen = np.array([True, True, False])
    sampling = Sampling(repetition_penalty=2.0, logit_bias={2: 0.5})
    assert adjust(row, seen, sampling).tolist() == [1.0, -4.0, 1.5]
    assert row.tolist() == [2.0, -2.0, 1.0]  # the engine's row is not written to


def test_presence_and_frequency_are_openais_penalties() -> None:
    """mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, after the repetition penalty, as in vLLM."""
    row, seen = np.array([2.0, -2.0, 1.0, 4.0], dtype=np.float32), np.array([True, True, False, True])
    counts = {0: 3, 1: 1}
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=-0.25)
    expected = [float(row[j]) - counts.get(j, 0) * -0.25 - (counts.get(j, 0) > 0) * 0.5 for j in range(4)]
    assert adjust(row, seen, sampling, generated=counts).tolist() == expected
    both = Sampling(presence_penalty=0.5, repetition_penalty=2.0)
    assert adjust(row, seen, both, generated={0: 1}).tolist() == [0.5, -4.0, 1.0, 2.0]


def test_the_nucleus_holds_the_token_that_reaches_the_mass() -> None:
    assert nucleus(PROBS, 0.4).tolist() == [True, False, False, False, False]
    assert nucleus(PROBS, 0.41).tolist() == [True, True, False, False, False]
    assert nucleus(PROBS, 1.0).all()


def plain(logits: Probabilities, temperature: float, top_k: int, top_p: float) -> Probabilities:
    """The same distribution, with every token sorted for each filter."""
    exps = np.exp((logits - logits.max()) / temperature)
    probs: Probabilities = exps / exps.sum()
    if 0 < top_k < len(probs):
        probs = only(probs, np.argsort(-probs, kind="stable")[:top_k])  # of equal tokens the first
    if top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
        probs = only(probs, order[before < top_p])
    return probs


def only(probs: Probabilities, kept: NDArray[np.intp]) -> Probabilities:
    left = np.where(np.isin(np.arange(len(probs)), kept), probs, 0.0)
    scaled: Probabilities = left / left.sum()
    return scaled


LOGITS_WITH_TIES: dict[str, Callable[[np.random.Generator, int], Probabilities]] = {
    "ties": lambda rng, size: rng.integers(0, 6, size) / 2.0,
    "all alike": lambda rng, size: np.zeros(size),
    "flat": lambda rng, size: rng.normal(size=size),
    "peaked": lambda rng, size: 12 * rng.normal(size=size).round(),
    "masked": lambda rng, size: np.where(np.arange(size) % 3 > 0, -np.inf, rng.integers(0, 4, size)),
}


@pytest.mark.parametrize("kind", LOGITS_WITH_TIES)
@pytest.mark.parametrize("size", [1, 2, 7, 300, 5000])
def test_filters_keep_the_tokens_that_sorting_all_of_them_keeps(kind: str, size: int) -> None:
    """To the last bit, and of equal tokens the first; also where top-p is so near 1 that sums round to less."""
    rng = np.random.default_rng(size)
    for top_p in (1e-12, 0.3, 0.9, 1 - 1e-6, 1 - 1e-12, np.nextafter(1, 0), 1.0):
        for top_k in (0, 1, 5, size, size + 1):
            logits = LOGITS_WITH_TIES[kind](rng, size)
            found = probabilities(logits, Sampling(temperature=0.8, top_k=top_k, top_p=float(top_p)))
            assert np.array_equal(found, plain(logits, 0.8, top_k, float(top_p)))


@pytest.mark.parametrize("kind", ["ties", "all alike", "flat", "peaked"])
def test_the_likeliest_tokens_are_those_that_sorting_gives(kind: str) -> None:
    """In order, and of equal tokens the first; as many as there are, if more are asked for."""
    row = LOGITS_WITH_TIES[kind](np.random.default_rng(1), 300).astype(np.float32)
    logits = row.astype(np.float64) - row.max()
    logs = logits - np.log(np.exp(logits).sum())
    for top in (0, 1, 20, 299, 300, 400):
        order = np.argsort(-logs, kind="stable")[:top].tolist()
        assert log_probabilities(row, 7, top) == (logs[7], tuple((token, logs[token]) for token in order))


def test_no_filter_sorts_all_tokens_of_a_likely_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting 200,000 tokens takes as long as a pass of a model."""
    rng, most = np.random.default_rng(0), []

    def watched(name: str) -> None:
        plain_sort = getattr(np, name)

        def sort(values: Probabilities, **settings: str) -> Probabilities:
            most.append(len(values))
            return plain_sort(values, **settings)  # type: ignore[no-any-return]

        monkeypatch.setattr(np, name, sort)

    watched("sort")
    watched("argsort")
    logits = 4 * rng.normal(size=200_064)
    for settings in ({"top_p": 0.9}, {"top_k": 40}, {"top_k": 40, "top_p": 0.9}):
        probabilities(logits, Sampling(temperature=1.0, **settings))  # type: ignore[arg-type]
    for top in (0, 20):
        log_probabilities(logits.astype(np.float32), 7, top)
    assert most and max(most) < 10_000


def test_a_draw_never_gives_an_impossible_token() -> None:
    probs = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    drawn = [draw(probs, u) for u in (0.0, 0.25, 0.4999, 0.5, 0.75, 1 - 1e-16)]
    assert drawn == [1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"min_p": 2},
        {"top_k": -1},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-320},  # divides logits into infinity
        {"repetition_penalty": 1e4},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": -1e4},
        {"seed": -1},
        {"seed": 2**64},
        {"accept_top_p": 0},
        {"temperature": float("nan")},
    ],
)
def test_senseless_settings_are_named(settings: dict[str, float]) -> None:
    with pytest.raises(DecodeError, match=next(iter(settings))):
        Sampling(**settings)  # type: ignore[arg-type]
