"""Stated confidence becomes an observed rate, and a request's own ease shows within it."""

import pytest

from shardmill.decode.policies import WidthCalibration


def test_it_starts_as_stated_and_ends_as_observed() -> None:
    calibration = WidthCalibration()
    assert [calibration.rate(c) for c in (0.0, 0.3, 0.8, 1.0)] == pytest.approx([0, 0.3, 0.8, 1], abs=1 / 12)
    assert calibration.expected([1.0, 1.0]) == [1, 2]
    half = calibration.rate(0.5)
    assert calibration.expected([0.5, 0.5]) == pytest.approx([half, half + half**2])
    for _ in range(300):
        calibration.observe([0.8, 0.8], 0)
    assert calibration.rate(0.8) < 0.02
    for _ in range(3000):
        calibration.observe([0.8], 1)
    assert calibration.rate(0.8) > 0.9  # old trials fade


def test_tokens_behind_a_wrong_one_prove_nothing() -> None:
    calibration = WidthCalibration()
    before = calibration.rate(0.2)
    calibration.observe([0.8, 0.2], 0)
    calibration.start()
    assert calibration.rate(0.2) == before
    calibration.observe([0.8, 0.2], 1)
    calibration.start()
    assert calibration.rate(0.2) < before


def test_a_hard_request_lowers_all_rates_until_the_next_one() -> None:
    """What was seen at one confidence tells of the others too, within a request."""
    calibration = WidthCalibration()
    for _ in range(400):
        calibration.observe([0.3], 0)
        calibration.observe([0.8], 1)
    calibration.start()
    usual = calibration.rate(0.8)
    for _ in range(10):
        calibration.observe([0.9], 0)
    assert calibration.rate(0.8) < 0.7 * usual
    calibration.start()
    assert calibration.rate(0.8) == usual


def test_an_easy_request_is_believed_within_bounds() -> None:
    calibration = WidthCalibration()
    for _ in range(400):
        calibration.observe([0.3], 0)
        calibration.observe([0.8], 0)
    calibration.start()
    for _ in range(30):
        calibration.observe([0.3], 1)
    low = calibration.rate(0.8)
    calibration.start()
    assert calibration.rate(0.8) < low < 1.3 * calibration.rate(0.8)
    assert calibration.rate(1.0) <= 1.0
