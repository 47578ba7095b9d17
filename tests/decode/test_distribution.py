"""Logits become the distribution that the settings describe."""

import numpy as np
import pytest

from shardmill.decode import DecodeError, Sampling
from shardmill.decode.distribution import adjust, draw, nucleus, probabilities

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


def test_the_nucleus_holds_the_token_that_reaches_the_mass() -> None:
    assert nucleus(PROBS, 0.4).tolist() == [True, False, False, False, False]
    assert nucleus(PROBS, 0.41).tolist() == [True, True, False, False, False]
    assert nucleus(PROBS, 1.0).all()


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
        {"seed": -1},
        {"seed": 2**64},
        {"accept_top_p": 0},
        {"temperature": float("nan")},
    ],
)
def test_senseless_settings_are_named(settings: dict[str, float]) -> None:
    with pytest.raises(DecodeError, match=next(iter(settings))):
        Sampling(**settings)  # type: ignore[arg-type]
