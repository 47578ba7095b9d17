"""Acceptance: the longest right prefix, then the token of the row after it; an EOS ends it."""

import pytest

from shardmill.decode.verify import Outcome, accept, agreement


@pytest.mark.parametrize(
    ("choices", "draft", "expected"),
    [
        ((4,), (), Outcome((4,), 0)),
        ((4, 5, 6, 7), (4, 5, 6), Outcome((4, 5, 6, 7), 3)),
        ((4, 5, 6, 7), (4, 5, 9), Outcome((4, 5, 6), 2)),
        ((4, 5, 6, 7), (9, 5, 6), Outcome((4,), 0)),
        ((4, 5, 6, 7), (4, 9, 6), Outcome((4, 5), 1)),  # right again after a wrong one counts nothing
        ((4, 0, 6, 7), (4, 0, 6), Outcome((4, 0), 2)),  # EOS accepted mid-draft
        ((4, 0, 6, 7), (4, 5, 6), Outcome((4, 0), 1)),  # EOS as the model's own choice
    ],
)
def test_the_longest_right_prefix_and_the_token_after_it(
    choices: tuple[int, ...], draft: tuple[int, ...], expected: Outcome
) -> None:
    assert accept(lambda i: choices[i], draft, {0}) == expected


def test_nothing_is_chosen_past_the_first_wrong_draft() -> None:
    """A chooser has state (seed, grammar): being asked for a row that is not emitted would spoil it."""
    asked: list[int] = []

    def choose(i: int) -> int:
        asked.append(i)
        return i

    accept(choose, (0, 1, 9, 3), ())
    assert asked == [0, 1, 2]


def test_another_reason_to_end_leaves_no_bonus_token() -> None:
    assert accept(lambda i: i, (0, 1, 2), (), ends=lambda: True) == Outcome((0,), 1)


@pytest.mark.parametrize(
    ("draft", "emitted", "right"), [((1, 2, 3), (1, 2), 2), ((1, 2), (1, 9, 3), 1), ((), (1,), 0), ((5,), (1,), 0)]
)
def test_agreement(draft: tuple[int, ...], emitted: tuple[int, ...], right: int) -> None:
    assert agreement(draft, emitted) == right
