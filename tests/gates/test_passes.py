"""Ways to cut a sequence: every token is kept exactly once, and the cuts are really different ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.gates.passes import (
    Pass,
    as_shipped,
    at_lengths,
    compared_widths,
    filled_up,
    in_passes,
    sampled,
    schedules,
    with_padding,
    with_rejected_drafts,
)


def kept(passes: list[Pass]) -> list[int]:
    """Positions whose rows are kept, in order."""
    return [position for p in passes for position in p.positions[: p.kept]]


@settings(max_examples=30)
@given(st.integers(1, 64), st.sampled_from([(1, 1), (2, 2), (4, 4), (8, 8), (4, 16), (1, 16), (4, 64)]))
def test_every_position_is_kept_once_and_in_order(length: int, widths: tuple[int, int]) -> None:
    verify, upper = widths
    shipped = {f"as shipped, {pads}": list(as_shipped(length, verify, upper, pads)) for pads in (False, True)}
    plain = {"plain": list(in_passes(length, [1]))}
    for name, passes in {**plain, **shipped, **schedules(length, verify, upper)}.items():
        assert kept(passes) == list(range(length)), name
        for p in passes:
            assert len(p.tokens) == len(p.positions) <= upper
            assert p.positions == tuple(range(p.positions[0], p.positions[0] + len(p.positions)))
            assert p.tokens[: p.kept] == p.positions[: p.kept]
            assert max((*p.tokens, *p.positions)) < length


def test_every_width_and_a_mixture_are_among_them() -> None:
    ways = schedules(64, 4, 4)
    assert list(ways) == ["T=2", "T=3", "T=4", "mixed", "rejected drafts"]
    for t in (2, 3, 4):
        assert {len(p.positions) for p in ways[f"T={t}"][:-1]} == {t}
    assert {len(p.positions) for p in ways["mixed"]} == {1, 2, 3, 4}


def test_one_token_a_pass_has_no_other_way() -> None:
    assert schedules(16, 1, 1) == {}


def test_of_wide_passes_only_the_widest_is_tested() -> None:
    """Else a build of 64 tokens would be fed 63 times over; the widest comes full, mixed with others, and padded."""
    ways = schedules(200, 4, 64)
    assert list(ways) == ["T=2", "T=3", "T=4", "T=64", "mixed", "rejected drafts", "padded"]
    assert [len(p.positions) for p in ways["T=64"]] == [64, 64, 64, 8]
    assert {1, 2, 4, 64} <= {len(p.positions) for p in ways["mixed"]}
    assert max(len(p.positions) for p in ways["rejected drafts"]) == 4
    short = schedules(200, 4, 64, pads=True)["padded"]  # which the program itself pads
    assert [len(p.positions) for p in short] == [p.kept for p in short] == [32] * 6 + [8]
    assert compared_widths(4, 64) == (2, 3, 4, 64) and compared_widths(1, 1) == () and compared_widths(1, 16) == (16,)


def test_what_is_shipped_runs_at_every_width_of_decoding_and_padded() -> None:
    """In fp16 a narrow pass, or what fills a pass up, may spoil what a full one does not."""
    passes = list(as_shipped(200, 4, 16))
    assert [(len(p.tokens), p.kept) for p in passes[:5]] == [(16, 16), (16, 8), (4, 4), (1, 1), (16, 16)]
    assert set(passes[1].tokens[8:]) == {passes[1].positions[7]}
    short = list(as_shipped(200, 4, 16, pads=True))  # the program itself pads
    assert [(len(p.tokens), p.kept) for p in short[:5]] == [(16, 16), (8, 8), (4, 4), (1, 1), (16, 16)]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (512, [*range(224, 256), *range(480, 512)]),
        (300, [*range(224, 256), *range(268, 300)]),
        (257, [*range(224, 256), 256]),
        (20, [*range(20)]),
    ],
)
def test_the_last_positions_of_each_stretch_are_sampled(count: int, expected: list[int]) -> None:
    assert sampled(count) == expected


def test_padding_repeats_the_last_token_and_is_overwritten() -> None:
    """As a session pads the last pass of a prompt."""
    passes = list(with_padding(40, 16))
    for p in passes[:2]:
        assert p.kept == 8 and set(p.tokens[8:]) == {p.positions[7]}
    assert [p.positions[0] for p in passes[:3]] == [0, 8, 16]


@pytest.mark.parametrize("width", [2, 3, 4])
def test_drafts_are_wrong_and_their_slots_are_still_there_in_a_later_pass(width: int) -> None:
    """A rejected slot that the next pass overwrites was never exposed to anything."""
    exposed, rejected = 0, set[int]()
    for p in with_rejected_drafts(64, width):
        exposed += bool(rejected - set(p.positions))
        rejected -= set(p.positions)
        wrong = {position for token, position in zip(p.tokens, p.positions, strict=True) if token != position}
        assert wrong <= set(p.positions[p.kept :])
        rejected |= set(p.positions[p.kept :])
    assert exposed >= (10 if width > 2 else 0)


def test_most_drafted_tokens_are_wrong() -> None:
    drafted = [
        (t, s)
        for p in with_rejected_drafts(64, 4)
        for t, s in zip(p.tokens[p.kept :], p.positions[p.kept :], strict=True)
    ]
    assert len(drafted) > 20
    assert sum(t != s for t, s in drafted) > 0.9 * len(drafted)


@pytest.mark.parametrize("count", [8, 40, 64])
def test_every_context_is_fed_and_moved_to_with_room_for_each_pass(count: int) -> None:
    """A text that fits into the first of them moves all the same."""
    ways = at_lengths(count, (1, 4, 16), 4, (32, 48, 128))
    ends = {slots: f"over the end of {slots} slots" for slots in (32, 48)}
    assert list(ways) == ["context of 32", "context of 48", "moving between contexts", *ends.values()]
    for slots in (32, 48):
        passes = ways[f"context of {slots}"]
        assert {p.slots for p in passes} == {slots} and kept(passes) == list(range(min(count, slots)))
        assert {len(p.positions) for p in passes} >= ({1, 4, 16} if count > 8 else {1, 4})
    moving = ways["moving between contexts"]
    assert [*dict.fromkeys(p.slots for p in moving)] == [32, 48, 128]
    assert kept(moving) == list(range(count)) and all(p.positions[-1] < p.slots for p in moving)
    assert any(p.tokens != p.positions for p in moving)
    for slots, name in ends.items():
        assert {slots - 1, slots} <= {place for p in ways[name] for place in p.places}
        assert all(p.places[-1] < p.slots and (p.slots == slots) == (p.places[0] < slots) for p in ways[name])
        assert kept(ways[name]) == list(range(len(kept(ways[name])))) and len(kept(ways[name])) >= min(count, 16)
    assert at_lengths(count, (1, 4), 4, (128,)) == {}


@pytest.mark.parametrize("widths", [(4,), (1, 4), (1, 4, 16)])
def test_passes_are_filled_up_to_the_widths_of_a_program_and_keep_their_rows(widths: tuple[int, ...]) -> None:
    """On Core ML every further width takes minutes; a session fills a pass up in the same way."""
    for name, passes in {"plain": list(in_passes(37, [1])), **schedules(37, 4, widths[-1])}.items():
        filled = list(filled_up(passes, widths, slots=64))
        assert kept(filled) == kept(passes), name
        assert {len(p.tokens) for p in filled} <= set(widths), name
        for p, before in zip(filled, passes, strict=True):
            count = len(before.tokens)
            assert p.tokens[:count] == before.tokens and set(p.tokens[count:]) <= {before.tokens[-1]}
            assert p.positions == tuple(range(p.positions[0], p.positions[0] + len(p.tokens)))


def test_no_pass_is_filled_up_beyond_its_context_or_without_widths() -> None:
    passes = list(in_passes(6, [1]))
    assert list(filled_up(passes, (), slots=64)) == passes
    assert [len(p.tokens) for p in filled_up(passes, (4,), slots=6)] == [4, 4, 4, 1, 1, 1]
    short = [Pass((5,), (5,), 1, slots=6)]
    assert list(filled_up(short, (4,), slots=64)) == short
