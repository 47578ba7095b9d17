"""What a measurement gives becomes a record that JSON can hold, whatever the numbers are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import limits
import numpy as np
import pytest
from kit_runner import child, measurements
from kit_runner.job import Measured, Refused, WrongError


def wrong(*_: Any) -> Measured:
    raise WrongError("wrong", {"psnr": float("nan")})


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (lambda *_: Measured(value={"psnr": float("-inf"), "rows": ["a"]}), ("ok", {"psnr": None, "rows": ["a"]}, {})),
        (lambda *_: Measured(timing={"ms": float("nan"), "passes": 2}), ("ok", {}, {"ms": None, "passes": 2})),
        (wrong, ("wrong", {"psnr": None}, {})),
    ],
)
def test_numbers_that_json_lacks_are_none(measure: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measurements.MEASURES, "parity", measure)
    record = child.measure_one(SimpleNamespace(), "head_0/parity.T=1")  # type: ignore[arg-type]
    json.dumps(record, allow_nan=False)
    assert (record["status"], record["value"], record["timing"]) == expected


def test_a_ratio_that_is_no_number_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded number may be none, in a kit that was damaged."""
    arrays = {"fp32": np.array([np.nan, 1.0]), "fp16": np.array([1.0, 1.0])}
    row = {"stride": 1, "fp32": "fp32", "fp16": "fp16"}
    monkeypatch.setattr(measurements, "_rows", lambda *_: [row])
    monkeypatch.setattr(measurements, "_caller", lambda *_: lambda inputs: np.ones((1, 2), np.float32))
    kit = SimpleNamespace(content={"limits": {"psnr": 30.0}})
    job = SimpleNamespace(inputs=lambda row: {}, array=arrays.__getitem__, kit=kit)
    with pytest.raises(WrongError, match="psnr is nan dB"):
        measurements.parity(job, 1)  # type: ignore[arg-type]


def used(told: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> Measured:
    """The energy of passes. Args: told what the meter says before and after."""

    @contextmanager
    def meter() -> Iterator[Callable[[], float]]:
        yield iter(told).__next__

    chain = SimpleNamespace(inputs=dict, run=lambda inputs: None)
    monkeypatch.setattr(measurements, "meter", meter)
    monkeypatch.setattr(measurements, "SECONDS", 1e-3)
    monkeypatch.setattr(measurements, "Chain", lambda job, width: chain)
    job: Any = SimpleNamespace(native=True, variant={"recorded": {"4": [{}]}})
    return measurements.energy(job, 4)


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
    found = measurements.count_alike(narrow, wide)
    assert found["agree"] == 1
    limits.numbers_agree("the margin", found["margin"], 0.5, limits.roundings("fp32", 3))
    assert measurements.count_alike(wide, wide) == {"agree": 2, "margin": 0.0}
