"""The rows of a verdict, and what is said of a number that missed its limit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardmill.errors import GateError
from shardmill.gates.measurement import Measurement, compare, describe
from shardmill.gates.thresholds import THRESHOLDS

from .judged import judge


def test_rows_carry_number_threshold_and_meaning() -> None:
    (row,) = judge("gate", [Measurement("kl", 0.001, "on a text")])
    assert row == {
        "name": "kl",
        "value": 0.001,
        "detail": "on a text",
        "threshold": "<= 0.02",
        "passed": True,
        "question": "3 cost",
        "meaning": THRESHOLDS["kl"].meaning,
    }


def test_every_miss_is_named_in_one_line() -> None:
    found = [Measurement("kl", 0.5), Measurement("psnr", 45.0), Measurement("width_error", 0.25, "T=3")]
    with pytest.raises(GateError) as error:
        judge("parity head_0", found)
    assert str(error.value) == "parity head_0: kl is 0.5, must be <= 0.02; width_error is 0.25, must be <= 0.0001 (T=3)"


@pytest.mark.parametrize(
    ("value", "limit", "told"),
    [
        (1.0101, 1.01, "is 1.0101, must be <= 1.01"),
        (1.00011, 1.0001, "is 1.00011, must"),
        (math.nan, 1, "is nan, must"),
    ],
)
def test_a_number_that_missed_never_reads_like_its_limit(value: float, limit: float, told: str) -> None:
    limits = {"psnr": replace(THRESHOLDS["psnr"], limit=limit, at_least=False)}
    assert told in describe(compare([Measurement("psnr", value)], limits)[0])
