"""What is measured of all programs together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardmill.lane import whole
from shardmill.lane.job import Found, Refused


def used(told: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> Found:
    """The energy of passes. Args: told what the meter says before and after."""

    @contextmanager
    def meter() -> Iterator[Callable[[], float]]:
        yield iter(told).__next__

    chain = SimpleNamespace(units=[], run=lambda inputs: None)
    monkeypatch.setattr(whole, "meter", meter)
    monkeypatch.setattr(whole, "SECONDS", 1e-3)
    monkeypatch.setattr(whole, "Chain", lambda job, width: chain)
    job: Any = SimpleNamespace(native=True, variant={"recorded": {"4": [{}]}})
    return whole.energy(job, 4)


def test_energy_is_that_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = used([100.0, 350.0], monkeypatch).timing
    assert timing["mj_per_pass"] * timing["passes"] == pytest.approx(250.0)


def test_no_energy_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where powermetrics ends at once, or names its samples otherwise."""
    with pytest.raises(Refused, match="reported no energy"):
        used([0.0, 0.0], monkeypatch)


def test_the_margin_is_how_far_the_gap_of_the_best_two_tokens_moves() -> None:
    """Of the first token the two change places; of the second the better one is less ahead."""
    narrow = np.array([[0.0, 1.0, 0.9], [3.0, 0.0, 0.0]], np.float32)
    wide = np.array([[0.0, 1.0, 1.2], [3.0, 0.5, 0.0]], np.float32)
    found = whole._apart(narrow, wide)
    assert found["agree"] == 1 and abs(found["margin"] - 0.5) < 1e-6
    assert whole._apart(wide, wide) == {"agree": 2, "margin": 0.0}
