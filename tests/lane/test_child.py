"""What a measurement gives becomes a record that JSON can hold, whatever the numbers are."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardmill.lane import child, measurements
from shardmill.lane.job import Found, WrongError


def wrong(*_: Any) -> Found:
    raise WrongError("wrong", {"psnr": float("nan")})


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (lambda *_: Found(value={"psnr": float("-inf"), "rows": ["a"]}), ("ok", {"psnr": None, "rows": ["a"]}, {})),
        (lambda *_: Found(timing={"ms": float("nan"), "passes": 2}), ("ok", {}, {"ms": None, "passes": 2})),
        (wrong, ("wrong", {"psnr": None}, {})),
    ],
)
def test_numbers_that_json_lacks_are_none(measure: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(child.MEASURES, "parity", measure)
    record = child._measured(SimpleNamespace(), "head_0/parity.T=1")  # type: ignore[arg-type]
    json.dumps(record, allow_nan=False)
    assert (record["status"], record["value"], record["timing"]) == expected


def test_a_ratio_that_is_no_number_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded number may be none, in a kit that was damaged."""
    arrays = {"fp32": np.array([np.nan, 1.0]), "fp16": np.array([1.0, 1.0])}
    row = {"stride": 1, "fp32": "fp32", "fp16": "fp16"}
    monkeypatch.setattr(measurements, "_rows", lambda *_: [row])
    monkeypatch.setattr(measurements, "caller", lambda *_: lambda inputs: np.ones((1, 2), np.float32))
    kit = SimpleNamespace(content={"limits": {"psnr": 30.0}})
    job = SimpleNamespace(inputs=lambda row: {}, array=arrays.__getitem__, kit=kit)
    with pytest.raises(WrongError, match="psnr is nan dB"):
        measurements.parity(job, 1)  # type: ignore[arg-type]
