"""What the default policy knows: what passes cost, how often drafts are right, and how much drafting may lose."""

import pytest
from drafted_decoding.policies import DraftBudget, WidthCalibration, WidthCosts


def test_what_was_measured_is_believed() -> None:
    costs = WidthCosts((1, 2, 4), {1: 2.0, 2: 2.4, 4: 3.0})
    assert [costs.ratio(n) for n in (1, 2, 3, 4)] == pytest.approx([1, 1.2, 1.5, 1.5])
    assert costs.in_passes(6.0) == pytest.approx(3)
    assert not costs.needs_single


def test_nothing_known_costs_nothing_extra() -> None:
    costs = WidthCosts((1, 4))
    assert costs.ratio(4) == 1
    assert costs.in_passes(5.0) == 0
    assert costs.needs_single


def test_the_first_call_of_a_width_does_not_count() -> None:
    costs = WidthCosts((1, 4))
    for width, seconds in [(1, 900.0), (4, 900.0), (1, 2.0), (4, 3.0)]:
        costs.add(width, seconds)
    assert costs.ratio(4) == pytest.approx(1.5)
    assert costs.in_passes(2.0) == pytest.approx(1)


def test_a_single_pass_is_asked_for_until_a_width_can_be_compared() -> None:
    """However many wide ones a prefill had before."""
    costs = WidthCosts((1, 4))
    asked = []
    for width in (4, 4, 4, 1, 4, 1, 4, 4):
        asked.append(costs.needs_single)
        costs.add(width, 1.0)
    assert asked == [True, True, True, True, False, True, False, False]


def test_only_neighbours_are_compared() -> None:
    """The machine became twice as slow in between: all widths, so nothing changes between them."""
    costs = WidthCosts((1, 4), {1: 1.0, 4: 1.5})
    for _ in range(40):
        costs.add(1, 2.0)
    for _ in range(40):
        costs.add(4, 6.0)  # three times as slow again
    assert costs.ratio(4) == pytest.approx(1.5, rel=0.2)


def test_a_single_slow_pass_among_many_changes_nothing() -> None:
    costs = WidthCosts((1, 4))
    for i in range(20):
        costs.add(1, 1.0)
        costs.add(4, 90.0 if i == 15 else 1.5)
    assert costs.ratio(4) == pytest.approx(1.5)


def test_a_width_that_has_not_been_seen_for_long_is_doubted() -> None:
    """Its extra cost halves after a number of passes, which is larger if the width was seen more often."""
    few, many = WidthCosts((1, 4)), WidthCosts((1, 4), {1: 1.0, 4: 9.0})
    for width, seconds in ((1, 1.0), (4, 1.0), (1, 1.0), (4, 9.0)):
        few.add(width, seconds)
    assert few.ratio(4) == many.ratio(4) == 9
    for _ in range(16):
        few.add(1, 1.0)
        many.add(1, 1.0)
    assert few.ratio(4) == pytest.approx(5)
    assert many.ratio(4) > 8
    few.add(4, 9.0)
    assert few.ratio(4) == 9


def test_a_wide_pass_is_never_cheaper_than_a_single_one() -> None:
    costs = WidthCosts((1, 4), {1: 2.0, 4: 1.0})
    assert costs.ratio(4) == 1


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


def test_a_request_begins_in_proportion_to_its_length() -> None:
    short, long, endless = DraftBudget(), DraftBudget(), DraftBudget()
    short.begin(40)
    long.begin(200)
    endless.begin(100_000)
    assert short.covers(0.3) and not short.covers(0.5)
    assert long.covers(1.9) and not long.covers(2.1)
    assert endless.covers(1.9) and not endless.covers(2.1)


def test_losses_close_it_and_passes_open_it_again() -> None:
    ledger = DraftBudget()
    ledger.begin(200)
    losses = 0
    while ledger.covers(0.4):
        ledger.book(-0.4)
        losses += 1
    assert losses * 0.4 == pytest.approx(2, abs=0.5)
    waited = 0
    while not ledger.covers(0.4):
        ledger.book(0.0)
        waited += 1
    assert 1 <= waited <= 60


def test_gains_are_kept_up_to_a_bound_and_hardly_beyond_a_request() -> None:
    ledger = DraftBudget()
    ledger.begin(200)
    for _ in range(100):
        ledger.book(3.0)
    assert ledger.covers(7.9) and not ledger.covers(8.0)
    ledger.begin(200)
    assert ledger.covers(3.5) and not ledger.covers(3.7)
    ledger.begin(40)
    assert not ledger.covers(0.8)


@pytest.mark.parametrize("tokens", [1, 40, 200, 2000])
def test_no_request_loses_three_per_cent_by_drafts_that_all_fail(tokens: int) -> None:
    """Whatever was won before it, and whatever a failure costs: what a task may lose against plain decoding is 3 %."""
    for price in (0.05, 0.26, 1.0):
        ledger, lost = DraftBudget(), 0.0
        ledger.begin(200)
        ledger.book(100.0)
        ledger.begin(tokens)
        for _ in range(tokens):
            failing = ledger.covers(price)
            lost += price * failing
            ledger.book(-price * failing)
        assert lost < 0.03 * tokens
