"""The learned drafter: this text before others, earlier requests where they help, private ones never."""

import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import log1p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted_decoding import DecodeError
from drafted_decoding.drafters import RequestInfo
from drafted_decoding.drafters.follow import KINDS, FollowTable, Numbering, context_keys
from drafted_decoding.drafters.learned import LearnedDrafter, fitted, parse_weights, situation
from numpy.typing import NDArray

from .texts import text

SHARE = (1.0, 0.0, 0.0)  # weights of a kind of context: of a follower's share alone
SILENT = (0.0, 0.0, 0.0)
OURS = Numbering(30, "digest")


def weighed(table: FollowTable, keys: Sequence[int], trust: float = 1.0) -> dict[int, float]:
    scores: defaultdict[int, float] = defaultdict(float)
    table.weigh(scores, table.find(keys), [trust] * KINDS)
    return scores


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
    learn(drafter, [1, 2, 6], [1, 2, 5])
    assert proposal(drafter, [5, 9, 1, 2])[0] == 5
    assert proposal(drafter, [6, 9, 1, 2])[0] == 6


def test_a_latecomer_can_become_a_top_follower() -> None:
    table = FollowTable([SHARE])
    for token in (1, 2, 3, 4, 5, 6, 7, 8, 9, 9):
        table.put(0, 0, token, 1)
    scores = weighed(table, (0,))
    assert max(scores, key=scores.__getitem__) == 9


def test_a_private_request_is_neither_learned_nor_informed() -> None:
    drafter = LearnedDrafter()
    learn(drafter, STORY, private=True)
    assert 13 not in proposal(drafter, [10, 11, 12])
    learn(drafter, STORY)
    assert 13 not in proposal(drafter, [10, 11, 12], private=True)
    assert proposal(drafter, [10, 11, 12]) == (13, 14, 15)


def test_drafters_side_by_side_learn_from_each_other() -> None:
    first = LearnedDrafter()
    second = first.sibling()
    second.reset([1, 2, 3, 4] * 4)
    second.finish()
    assert first.pairs == second.pairs > 0
    first.reset([9, 1, 2, 3])
    assert first.propose([9, 1, 2, 3], 1).tokens == (4,)


def test_an_unfinished_request_is_not_learned() -> None:
    drafter = LearnedDrafter()
    drafter.reset(STORY)
    assert 13 not in proposal(drafter, [10, 11, 12])


def test_what_followed_a_token_the_time_before_is_a_context() -> None:
    """After a line break came 1, then 2: where 2 came last, a table that saw lists proposes 3."""
    line = 0
    only = parse_weights(
        {
            "own": [SILENT] * 3,
            "table": [SILENT, SILENT, SILENT, SHARE],
            "own_trust": [[1.0] * 3] * 16,
            "table_trust": [[1.0] * 4] * 16,
            "held": [0.0, 0.0],
            "none": 0.0,
        }
    )
    drafter = LearnedDrafter(evidence=only)
    learn(drafter, *([line, 1, 50 + i, line, 2, 60 + i, line, 3, 70 + i] for i in range(3)))
    assert proposal(drafter, [line, 1, 80, line, 2, 90, line])[0] == 3


def test_the_table_stays_within_its_size_and_keeps_the_frequent() -> None:
    drafter = LearnedDrafter(size=3000)
    for seed in range(30):
        learn(drafter, STORY, text(seed, 100, vocab=200))
        assert drafter.pairs <= 3000
        assert drafter.pairs == len(drafter._table)
    assert proposal(drafter, [10, 11, 12])[0] == 13


def test_a_full_table_forgets_no_more_than_it_learns() -> None:
    """Of texts without repetition, everything was seen once: halving all counts at once would leave nothing."""
    drafter, least = LearnedDrafter(size=3000), []
    for seed in range(60):
        learn(drafter, text(seed, 100, vocab=10_000))
        least.append(drafter.pairs)
    assert min(least[30:]) > 2900 and drafter.pairs == len(drafter._table)
    assert proposal(drafter, text(59, 100, vocab=10_000)[:50])[0] == text(59, 100, vocab=10_000)[50]


def test_texts_that_come_again_take_hardly_more_memory() -> None:
    """Bound the memory, not only the number of pairs: an agent's system prompt comes with each of its requests."""
    drafter, texts, sizes = LearnedDrafter(), [text(seed, 200, vocab=10_000) for seed in range(20)], []
    tracemalloc.start()
    try:
        for _ in range(5):
            learn(drafter, *texts)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(sizes) < 1.5 * sizes[0]
    assert max(sizes) < 150 * drafter.pairs


def test_forgetting_halves_counts_and_drops_single_ones_of_the_oldest_contexts() -> None:
    table = FollowTable([SHARE])
    for key in (1, 2):
        for token in (5, 5, 6):
            table.put(0, key, token, 1)
    assert table.forget(1) == 1
    assert list(table.rows()) == [(0, 2, 5, 2), (0, 2, 6, 1), (0, 1, 5, 1)]
    assert table.forget(2) == 2
    assert list(table.rows()) == [(0, 2, 5, 1)]
    assert table.forget(9) == 1 and not len(table)


def test_forgetting_takes_little_work_however_often_everything_was_seen() -> None:
    """Halving would have to go round the whole table before anything is free."""
    table = FollowTable([SHARE])
    for key in range(10_000):
        table.put(0, key, 5, 1000)
    before = set(table.rows())
    assert table.forget(3) == 3 and len(table) == 9997
    assert len(before - set(table.rows())) < 50


def test_all_kinds_of_contexts_are_forgotten_alike() -> None:
    """A kind with few contexts would otherwise be halved over and over."""
    table = FollowTable([SHARE, SHARE])
    for key in range(5000):
        table.put(0, key, 5, 1)
        table.put(1, key % 500, 5 + key // 500, 1)
    for _ in range(10):
        assert 300 <= table.forget(300) < 310
    left = [sum(kind == row[0] for row in table.rows()) for kind in (0, 1)]
    assert left == pytest.approx([3500, 3500], abs=100)


@pytest.mark.parametrize("seed", range(4))
def test_a_context_adds_share_presence_and_logarithm_of_the_count(seed: int) -> None:
    """Against a direct count, for contexts with one, few and many followers."""
    weights = (1.5, 0.25, 0.5)
    for vocab in (1, 2, 4):
        table = FollowTable([None, weights])
        followers = Counter(text(seed, 30, vocab=vocab))
        for token, count in followers.items():
            for _ in range(count):
                table.add((7, 8), token)
        whole = 30 + 0.5 * len(followers)
        expected = {t: 2 * (1.5 * n / whole + 0.25 + 0.5 * log1p(n)) for t, n in followers.items()}
        assert weighed(table, (7, 8), trust=2.0) == pytest.approx(expected)


def test_what_followed_once_counts_as_such() -> None:
    table = FollowTable([(1.5, 0.25, 0.5)])
    table.add((7,), 3)
    assert weighed(table, (7,)) == pytest.approx({3: 1.5 / 1.5 + 0.25 + 0.5 * log1p(1)})


def test_kinds_without_weights_are_not_kept() -> None:
    table = FollowTable([None, SHARE])
    assert table.add((7, 8), 3) == 1
    assert [row[0] for row in table.rows()] == [1]


def test_context_keys_tell_contexts_apart() -> None:
    tails = [(a, b, c) for a in range(-1, 4) for b in range(-1, 4) for c in range(4)]
    assert len({context_keys(t, -1)[2] for t in tails}) == len(tails)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_saved_table_proposes_the_same(seed: int, tmp_path: Path) -> None:
    drafter, again = LearnedDrafter(), LearnedDrafter()
    learn(drafter, *(text(seed + i, 100, vocab=30) for i in range(5)))
    drafter.save(tmp_path / "table.npz", OURS)
    again.load(tmp_path / "table.npz", OURS)
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
            LearnedDrafter().load(path, OURS)


@pytest.mark.thorough
def test_a_damaged_table_is_refused_in_one_way(tmp_path: Path) -> None:
    """Whichever byte is another, it is refused, or loads; the libraries raise whatever they like."""
    drafter, path = LearnedDrafter(), tmp_path / "table.npz"
    learn(drafter, *(text(i, 100, vocab=30) for i in range(5)))
    drafter.save(path, OURS)
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        try:
            LearnedDrafter().load(path, OURS)
        except DecodeError:
            refused += 1
    assert refused > len(whole) // 10


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": np.zeros((1, 1), int)},
        {"token": np.array(5)},
        {"key": np.zeros((1, 3, 1), int)},
        {"key": np.zeros((1, 2), int)},
        {"count": np.array([1, 1])},
        {"count": np.array([1.5])},
        {"key": np.zeros((1, 3))},
        {"token": np.array(["5"])},
    ],
)
def test_a_table_with_columns_of_another_form_is_refused(changes: dict[str, NDArray[Any]], tmp_path: Path) -> None:
    content: dict[str, NDArray[Any]] = {"vocab": np.array(30), "tokenizer": np.array("digest")}
    content |= {"kind": np.array([0]), "key": np.zeros((1, 3), int), "token": np.array([5]), "count": np.array([1])}
    np.savez(tmp_path / "table.npz", **content | changes)  # type: ignore[arg-type]
    with pytest.raises(DecodeError, match="its columns do not match"):
        LearnedDrafter().load(tmp_path / "table.npz", OURS)


@pytest.mark.parametrize(
    ("numbering", "says"),
    [(Numbering(200_064, "digest"), "with 200064 tokens, this one has 30"), (Numbering(30, "other"), "another token")],
)
def test_another_model_s_table_is_refused(numbering: Numbering, says: str, tmp_path: Path) -> None:
    """Its numbers would stand for other words, or for none."""
    drafter = LearnedDrafter()
    learn(drafter, STORY)
    drafter.save(tmp_path / "table.npz", numbering)
    with pytest.raises(DecodeError, match=f"table.npz: this draft table was learned from a model .*{says}"):
        LearnedDrafter().load(tmp_path / "table.npz", OURS)


@pytest.mark.parametrize(
    ("column", "value"), [("kind", 9), ("key", -1), ("key", 31), ("token", 30), ("token", -1), ("count", 0)]
)
def test_a_table_with_numbers_out_of_range_is_refused(column: str, value: int, tmp_path: Path) -> None:
    """Whatever its header says: a token outside the vocabulary must not come in by a damaged file."""
    content = {"kind": np.array([0]), "key": np.zeros((1, 3), int), "token": np.array([5]), "count": np.array([1])}
    path, header = tmp_path / "table.npz", {"vocab": np.array(30), "tokenizer": np.array("digest")}
    np.savez(path, **header, **content)
    LearnedDrafter().load(path, OURS)
    content[column] = np.full_like(content[column], value)
    np.savez(path, **header, **content)
    with pytest.raises(DecodeError, match="out of range"):
        LearnedDrafter().load(path, OURS)


def test_the_situation_is_the_longest_context_known_to_each() -> None:
    known, unknown = 5, None
    assert situation([unknown] * 3, [unknown] * 3) == 0
    assert situation([known, unknown, unknown], [known, known, unknown]) == 4 * 1 + 2
    assert situation([known] * 3, [known] * 3) == 15
    assert len(fitted().own_trust) == len(fitted().table_trust) == 16


def test_a_token_that_the_text_holds_has_a_bonus_and_none_has_not() -> None:
    content = {"own": [], "table": [], "own_trust": [], "table_trust": [], "held": [1.0, 0.5], "none": 0.0}
    assert parse_weights(content).held == pytest.approx((0, 0.7, 0.9, 1.1, 1.3, 1.5))
    assert parse_weights(content).none == 1.0


def test_confidence_is_a_chance_that_grows_with_the_evidence() -> None:
    drafter = LearnedDrafter()
    sure = []
    for repeats in (1, 3, 9):
        drafter.reset([1, 2, 3] * repeats + [1, 2])
        sure.append(drafter.propose([], 1).confidence[0])
    assert 0 < sure[0] < sure[1] < sure[2] < 1
