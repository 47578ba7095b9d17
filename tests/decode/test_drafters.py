"""What each drafter proposes, against slow and obvious references where there are any."""

import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from shardmill.decode import DecodeError, Session, create_drafter
from shardmill.decode.drafters import DRAFTERS, Draft, RequestInfo
from shardmill.decode.drafters.follow import FollowTable, context_keys, decayed
from shardmill.decode.drafters.learned import LearnedDrafter
from shardmill.decode.drafters.mixed import MixedDrafter
from shardmill.decode.drafters.ngram import NgramDrafter
from shardmill.decode.drafters.suffix import SuffixAutomaton, SuffixDrafter

from .scripted import OracleDrafter, ScriptedEngine, repetitive


def text(seed: int, length: int = 300, vocab: int = 6) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


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


def test_suffix_asks_for_a_match_as_long_as_told() -> None:
    drafter = SuffixDrafter(shortest=2)
    drafter.reset([1, 2, 3, 1])
    assert drafter.propose([1, 2, 3, 1], 3) == Draft()
    drafter.observe([2], 0)
    assert drafter.propose([1, 2, 3, 1, 2], 1).tokens == (3,)


@pytest.mark.parametrize("name", [n for n in DRAFTERS if n != "draft_model"])
def test_drafts_keep_to_the_limit_and_to_known_tokens(name: str) -> None:
    tokens = text(3, 60)
    drafter = create_drafter(name)
    drafter.reset(tokens)
    for limit in (0, 1, 3):
        draft = drafter.propose(tokens, limit)
        assert len(draft.tokens) <= limit
        assert set(draft.tokens) <= set(tokens)
        assert all(0 <= c <= 1 for c in draft.confidence)
        assert len(draft.confidence) in (0, len(draft.tokens))


@pytest.mark.parametrize("name", [n for n in DRAFTERS if n not in ("none", "draft_model")])
def test_a_new_request_forgets_the_last_text(name: str) -> None:
    drafter = create_drafter(name)
    drafter.reset([1, 2, 3, 1, 2], RequestInfo(private=True))
    drafter.finish()
    drafter.reset([7, 8, 9, 7])
    assert drafter.propose([7, 8, 9, 7], 2).tokens[:1] == (8,)
    assert not {1, 2, 3} & set(drafter.propose([7, 8, 9, 7], 3).tokens)


def learn(drafter: LearnedDrafter, *requests: list[int], private: bool = False) -> None:
    for tokens in requests:
        drafter.reset(tokens[:2], RequestInfo(private=private))
        drafter.observe(tokens[2:], 0)
        drafter.finish()


def proposal(drafter: LearnedDrafter, tokens: list[int], *, private: bool = False) -> tuple[int, ...]:
    drafter.reset(tokens, RequestInfo(private=private))
    return drafter.propose(tokens, 3).tokens


STORY = [10, 11, 12, 13, 14, 15]


def test_learned_goes_on_as_earlier_requests_did() -> None:
    drafter = LearnedDrafter()
    learn(drafter, STORY)
    assert proposal(drafter, [10, 11, 12]) == (13, 14, 15)


def test_learned_prefers_this_text_to_earlier_ones() -> None:
    drafter = LearnedDrafter()
    learn(drafter, STORY)
    assert proposal(drafter, [11, 12, 99, 98, 11, 12])[:2] == (99, 98)


def test_learned_prefers_followers_that_the_text_holds() -> None:
    drafter = LearnedDrafter()
    learn(drafter, [1, 2, 5], [1, 2, 5], [1, 2, 6])
    assert proposal(drafter, [9, 1, 2])[0] == 5
    assert proposal(drafter, [6, 9, 1, 2])[0] == 6


def test_a_latecomer_can_become_a_top_follower() -> None:
    table = FollowTable()
    for token in (1, 2, 3, 4, 5, 6, 7, 8, 9, 9):
        table.put(0, 0, token, 1.0)
    votes: dict[int, float] = defaultdict(float)
    table.votes(votes, (1.0,), (0,), (0,))
    assert max(votes, key=votes.__getitem__) == 9


def test_a_private_request_is_neither_learned_nor_informed() -> None:
    drafter = LearnedDrafter()
    learn(drafter, STORY, private=True)
    assert 13 not in proposal(drafter, [10, 11, 12])
    learn(drafter, STORY)
    assert 13 not in proposal(drafter, [10, 11, 12], private=True)
    assert proposal(drafter, [10, 11, 12]) == (13, 14, 15)


def test_an_unfinished_request_is_not_learned() -> None:
    drafter = LearnedDrafter()
    drafter.reset(STORY)
    assert 13 not in proposal(drafter, [10, 11, 12])


def test_numbered_lists_count_on() -> None:
    """After a line break came 1, then 2: where 2 came last, a table that saw lists proposes 3."""
    line, drafter = 0, LearnedDrafter()
    lists = [[line, 1, 50 + i, line, 2, 60 + i, line, 3, 70 + i] for i in range(3)]
    learn(drafter, *lists)
    assert proposal(drafter, [line, 1, 80, line, 2, 90, line])[0] == 3


def test_the_table_stays_within_its_size_and_keeps_the_frequent() -> None:
    drafter = LearnedDrafter(size=3000)
    for seed in range(30):
        learn(drafter, STORY, text(seed, 100, vocab=200))
        assert drafter.pairs <= 3000
        assert drafter.pairs == len(drafter._table)
    assert proposal(drafter, [10, 11, 12])[0] == 13


def test_decay_halves_counts_and_drops_single_ones() -> None:
    table = FollowTable()
    for token in (5, 5, 6):
        table.put(0, 1, token, 1.0)
    assert list(decayed(table, 0.5, 1.0).rows()) == [(0, 1, 5, 1.0)]


def test_context_keys_tell_contexts_apart() -> None:
    tails = [(a, b, c) for a in range(-1, 4) for b in range(-1, 4) for c in range(4)]
    assert len({context_keys(t, -1)[2] for t in tails}) == len(tails)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_saved_table_proposes_the_same(seed: int, tmp_path: Path) -> None:
    drafter, again = LearnedDrafter(), LearnedDrafter()
    learn(drafter, *(text(seed + i, 100, vocab=30) for i in range(5)))
    drafter.save(tmp_path / "table.npz")
    again.load(tmp_path / "table.npz")
    assert again.pairs == drafter.pairs
    for i in range(30):
        context = text(100 + i, 12, vocab=30)
        assert proposal(again, context) == proposal(drafter, context)
    assert [p.name for p in tmp_path.iterdir()] == ["table.npz"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, content in [("missing", None), ("text", b"no table"), ("other.npz", "npz")]:
        path = tmp_path / name
        if content == "npz":
            np.savez(path, kind=np.array([9]), key=np.zeros((1, 3)), token=np.zeros(1), count=np.zeros(1))
        elif content is not None:
            path.write_bytes(content)  # type: ignore[arg-type]
        with pytest.raises(DecodeError, match="no saved draft table"):
            LearnedDrafter().load(path)


class Fixed(OracleDrafter):
    """Always proposes the same and says how sure it is."""

    def __init__(self, token: int, confidence: float) -> None:
        super().__init__((), 50)
        self.draft = Draft((token,), (confidence,))
        self.heard: list[int] = []

    def propose(self, context, limit: int) -> Draft:  # type: ignore[no-untyped-def]
        return self.draft

    def observe(self, emitted, accepted: int) -> None:  # type: ignore[no-untyped-def]
        self.heard.append(accepted)


def test_mixed_takes_the_better_promise_and_learns_who_boasts() -> None:
    boaster, modest = Fixed(1, 0.8), Fixed(2, 0.4)
    mixed = MixedDrafter([boaster, modest])
    mixed.reset([0])
    assert mixed.propose([0], 1) == boaster.draft
    for _ in range(20):
        mixed.propose([0], 1)
        mixed.observe([2], 0)
    assert mixed.propose([0], 1) == modest.draft


def test_mixed_tells_each_member_how_its_own_proposal_fared() -> None:
    right, wrong = Fixed(2, 0.4), Fixed(1, 0.5)
    mixed = MixedDrafter([right, wrong])
    mixed.propose([0], 1)
    mixed.observe([2, 5], 0)
    assert (right.heard, wrong.heard) == ([0], [0])  # nothing was accepted: the other's draft was verified
    mixed.propose([0], 1)
    mixed.observe([2, 5], 1)
    assert (right.heard, wrong.heard) == ([0, 1], [0, 0])


def draft_session(**settings: int) -> Session:
    return Session(ScriptedEngine(next_token=repetitive(50), **settings))


def test_the_draft_model_says_what_it_would_generate() -> None:
    drafter = create_drafter("draft_model", draft_session=draft_session())
    context = [1, 2, 3]
    drafter.reset(context)
    first = drafter.propose(context, 3).tokens
    fresh, grown = draft_session(), list(context)
    for _ in range(3):
        grown.append(int(fresh.prefill(grown).row.argmax()))
    assert list(first) == grown[3:]


def test_the_draft_model_feeds_only_what_its_cache_lacks() -> None:
    session = draft_session()
    drafter = create_drafter("draft_model", draft_session=session)
    context = [1, 2, 3]
    drafter.reset(context)
    tokens = drafter.propose(context, 3).tokens
    drafter.observe([tokens[0], 9], 1)
    session.engine.calls.clear()  # type: ignore[attr-defined]
    drafter.propose([*context, tokens[0], 9], 3)
    assert [c[0] for c in session.engine.calls] == [4, 5, 6]  # type: ignore[attr-defined]


def test_a_draft_model_with_a_full_context_falls_silent() -> None:
    drafter = create_drafter("draft_model", draft_session=draft_session(slots=8))
    drafter.reset([1] * 6)
    assert len(drafter.propose([1] * 6, 3).tokens) == 3
    drafter.observe([1], 0)
    assert len(drafter.propose([1] * 8, 3).tokens) == 1
    drafter.observe([1], 0)
    assert drafter.propose([1] * 9, 3) == Draft()


def test_a_draft_model_draws_reproducibly_and_says_from_what() -> None:
    def drawn(seed: int) -> Draft:
        drafter = create_drafter("draft_model", draft_session=draft_session())
        drafter.reset([1, 2], RequestInfo(temperature=1.0, seed=seed))
        return drafter.propose([1, 2], 3)

    draft = drawn(1)
    assert draft.distributions is not None
    assert draft.distributions.shape == (3, 50)
    assert draft.distributions.sum(axis=1) == pytest.approx(1)
    assert drawn(1).tokens == draft.tokens
    assert len({drawn(seed).tokens for seed in range(8)}) > 1


def test_drafters_that_cannot_be_made_are_named() -> None:
    with pytest.raises(DecodeError, match="no drafter is called 'magic'"):
        create_drafter("magic")
    with pytest.raises(DecodeError, match="needs a draft model"):
        create_drafter("draft_model")
    with pytest.raises(DecodeError, match="share a tokenizer"):
        create_drafter("draft_model", draft_session=draft_session(), vocab=51)
