"""The account bounds what drafting may lose, per request and per pass, and a good past pays for little."""

import pytest

from shardmill.decode.policies import DraftBudget


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
