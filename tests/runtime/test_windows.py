"""Windows over a text: every token once, with as much around it as was promised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.runtime.kv import Floats
from shardmill.runtime.windows import cut_windows, is_exact, text_windows

REACH = 3
EXACT = 8  # tokens of the shortest windows that are exact at that reach


def neighbours(tokens: Sequence[int]) -> Floats:
    """A model whose rows are the tokens up to REACH away, and zeros beyond the ends."""
    padded = [0] * REACH + list(tokens) + [0] * REACH
    rows = [padded[i : i + 2 * REACH + 1] for i in range(len(tokens))]
    return np.array(rows, np.float32).reshape(len(tokens), 2 * REACH + 1)


@given(st.integers(1, 200), st.integers(4, 40), st.sampled_from([None, 1, REACH, 10]))
def test_every_token_is_taken_once_from_within_its_window(count: int, longest: int, reach: int | None) -> None:
    taken = []
    for start, end, first, last in cut_windows(count, longest, reach):
        assert 0 <= start <= first < last <= end <= count and end - start <= longest
        if is_exact(longest, reach) and reach is not None:
            assert (start == 0 or first - start >= reach) and (end == count or end - last >= reach)
        taken += range(first, last)
    assert taken == list(range(count))


@pytest.mark.parametrize(("longest", "reach"), [(2080, 1024), (512, 255), (4096, 1537)])
def test_a_long_text_never_takes_many_more_passes_for_being_exact(longest: int, reach: int) -> None:
    """Exact windows of 512 tokens and a reach of 255 would advance by 2: 4,745 passes for 10,000 tokens."""
    assert not text_windows(range(10_000), ([901], [902]), longest, reach).exact
    assert len(cut_windows(10_000, longest, reach)) <= 2 * 10_000 / longest + 1


def test_windows_that_advance_by_a_quarter_are_exact() -> None:
    assert text_windows(range(10_000), ([901], [902]), 4096, 1536).exact
    assert [start for start, *_ in cut_windows(10_000, 4096, 1536)][:3] == [0, 1024, 2048]


@given(st.integers(1, 150), st.integers(EXACT, 30))
def test_exact_windows_give_what_the_whole_text_does(count: int, longest: int) -> None:
    tokens, around = list(range(1, count + 1)), ([901], [902])
    found = text_windows(tokens, around, longest, REACH)
    assert found.exact and (len(found.tokens) == 1) == (count + 2 <= longest)
    assert np.array_equal(
        found.joined([neighbours(one) for one in found.tokens]), neighbours([901, *tokens, 902])[1:-1]
    )


@pytest.mark.parametrize("reach", [None, 50])
def test_other_windows_are_texts_of_their_own(reach: int | None) -> None:
    """Each begins and ends as a text does, and says that it is an approximation."""
    found = text_windows(list(range(1, 101)), ([901], [902]), 20, reach)
    rows = found.joined([neighbours(one) for one in found.tokens])
    assert not found.exact and len(found.tokens) > 5 and len(rows) == 100
    assert all(window[0] == 901 and window[-1] == 902 and len(window) <= 20 for window in found.tokens)
    assert rows[:, REACH].tolist() == list(range(1, 101))


@given(st.integers(1, 60), st.integers(2, 5), st.integers(EXACT, 12))
def test_what_stands_around_a_text_is_never_taken_for_it(count: int, around: int, longest: int) -> None:
    tokens = list(range(1, count + 1))
    found = text_windows(tokens, ([901] * around, [902] * around), longest, REACH)
    rows = found.joined([neighbours(one) for one in found.tokens])
    assert rows[:, REACH].tolist() == tokens
