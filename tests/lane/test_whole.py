"""What is measured of all programs together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

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
    with pytest.raises(Refused, match="told of no energy"):
        used([0.0, 0.0], monkeypatch)
