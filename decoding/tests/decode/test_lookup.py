"""`ngram` and `suffix` against slow and obvious references."""

from collections import Counter

import pytest
from drafted_decoding import DecodeError
from drafted_decoding.drafters import Draft
from drafted_decoding.drafters.lookup import NgramDrafter, SuffixAutomaton, SuffixDrafter

from .texts import text


def occurrences(tokens: list[int], end: list[int]) -> list[int]:
    """Positions behind every occurrence of `end` that something follows."""
    n = len(end)
    return [i + n for i in range(len(tokens) - n) if tokens[i : i + n] == end]


def ngram_reference(tokens: list[int], limit: int, longest: int) -> list[int]:
    """Scans the text backwards for every token."""
    grown, known = list(tokens), len(tokens)
    while len(grown) < known + limit:
        for n in range(min(longest, len(grown)), 0, -1):
            found = occurrences(tokens, grown[-n:])
            if found:
                grown.append(tokens[found[-1]])
                break
        else:
            break
    return grown[known:]


@pytest.mark.parametrize("seed", range(12))
def test_ngram_takes_the_longest_suffix_and_the_latest_match(seed: int) -> None:
    tokens = text(seed, 80)
    drafter = NgramDrafter(longest=4)
    drafter.reset(tokens[:20])
    for i in range(20, 80):
        assert list(drafter.propose(tokens[:i], 3).tokens) == ngram_reference(tokens[:i], 3, 4)
        drafter.observe([tokens[i]], 0)


def test_ngram_proposes_nothing_for_what_is_new() -> None:
    drafter = NgramDrafter(shortest=2)
    drafter.reset([1, 2, 3, 9, 2])
    assert drafter.propose([1, 2, 3, 9, 2], 3) == Draft()
    with pytest.raises(DecodeError, match="n-grams of 3 to 2"):
        NgramDrafter(longest=2, shortest=3)


@pytest.mark.parametrize("seed", range(8))
def test_the_automaton_finds_the_longest_earlier_match(seed: int) -> None:
    tokens = text(seed, 120, vocab=3)
    automaton = SuffixAutomaton()
    for i, token in enumerate(tokens):
        automaton.extend(token)
        grown = tokens[: i + 1]
        longest = max((n for n in range(i + 1) if n == 0 or occurrences(grown, grown[-n:])), default=0)
        assert automaton.length[automaton.match] == longest
        followers = {grown[p] for p in occurrences(grown, grown[-longest:])} if longest else set(grown)
        assert set(automaton.next[automaton.match]) == followers
        if longest:
            counts = Counter(grown[p] for p in occurrences(grown, grown[-longest:]))
            assert counts[automaton.best[automaton.match]] == max(counts.values())


def test_suffix_prefers_the_frequent_continuation_to_the_latest() -> None:
    tokens = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 4, 1, 2]
    drafter = SuffixDrafter()
    drafter.reset(tokens)
    assert drafter.propose(tokens, 2).tokens == (3, 7)


def test_suffix_is_as_sure_as_its_match_is_long() -> None:
    """The match grows by one per drafted token, wherever in the text it was found."""
    tokens = [*range(100, 200), 5, 6, 7, 8, 9, 1, 6]
    drafter = SuffixDrafter()
    drafter.reset(tokens)
    assert drafter.propose(tokens, 3) == Draft((7, 8, 9), pytest.approx((1 / 2.5, 2 / 3.5, 3 / 4.5)))


def test_suffix_stays_linear() -> None:
    """States of a suffix automaton number less than twice its text."""
    automaton = SuffixAutomaton()
    for token in text(1, 3000, vocab=40):
        automaton.extend(token)
    assert len(automaton.next) < 6000
