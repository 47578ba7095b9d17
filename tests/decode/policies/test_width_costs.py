"""The cost of a width is told by passes side by side, survives slow spells, and is doubted when it gets old."""

import pytest

from shardmill.decode.policies import WidthCosts


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
    """Half of its extra cost goes with every so many passes, the later the more often it was seen."""
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
