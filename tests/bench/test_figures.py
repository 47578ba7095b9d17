"""The benchmark's arithmetic: medians of pairs, sums over passes, and nothing rounded up to exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardmill.bench import speed
from shardmill.bench.prompts import Prompt, Replay
from shardmill.bench.speed import PrefillSpeed, acceptance, pass_seconds

from .answers import PROMPT, answer, pair


def test_a_speed_up_is_the_median_of_the_ratios_within_pairs() -> None:
    """A slow moment that hits both of a pair changes no ratio; one that hits a single request is no median."""
    pairs = [
        pair(answer(decode_seconds=2.0), decode_seconds=1.0),
        pair(answer(decode_seconds=40.0), decode_seconds=16.0),  # both slow: 2.5
        pair(answer(decode_seconds=2.0), decode_seconds=9.0),
        pair(answer(decode_seconds=2.0), decode_seconds=1.0),
    ]
    row = speed.row(pairs, [])
    assert row["speedup"] == pytest.approx(2.0)
    assert row["speedup_range"] == pytest.approx([2 / 9, 2.5])


def test_the_first_token_is_the_prefill_s() -> None:
    """Four of five tokens took the time of decoding."""
    row = speed.row([pair(decode_seconds=1.0)], [])
    assert (row["plain_ms_per_token"], row["ms_per_token"]) == (500.0, 250.0)


def test_one_wrong_token_is_not_called_exact() -> None:
    """The prompt and the first token that differs are named, once, however often they were asked."""
    other = Prompt("task", "2.txt", (1, 2))
    wrong = {"tokens": (1, 2, 9, 4, 5)}
    row = speed.row([pair(), pair(prompt=other, **wrong), pair(prompt=other, **wrong)], [])
    assert row["exact"] == pytest.approx(1 / 3)
    assert row["differs"] == [{"prompt": "2.txt", "token": 2, "margin": None}]


def test_how_close_the_first_wrong_token_was_goes_with_it() -> None:
    wrong = replace(pair(tokens=(1, 2, 9, 4, 5)), margin=0.25)
    assert speed.row([wrong], [])["differs"] == [{"prompt": "1.txt", "token": 2, "margin": 0.25}]


def test_rows_that_the_guard_ran_again_are_summed() -> None:
    """And their share of the decoded tokens: each answer has four."""
    row = speed.row([pair(verified_again=2), pair(), pair(verified_again=1)], [])
    assert (row["verified_again"], row["verified_again_share"]) == (3, 0.25)


def test_drafts_are_counted_by_position() -> None:
    """Position 2 counts only passes that drafted so far, and only acceptance up to there."""
    got = acceptance([answer(drafted=(3, 2, 0, 3), accepted=(3, 0, 0, 1)), answer(drafted=(1,), accepted=(1,))])
    assert got["by_position"] == [[3, 4], [1, 3], [1, 2]]
    assert (got["accepted"], got["drafted"], got["rate"]) == (5, 9, 5 / 9)


def test_tokens_per_pass_counts_what_came_out() -> None:
    """A text may end within a draft, so the sum of accepted drafts says less than the tokens do."""
    ended = answer(tokens=(1, 2, 3, 4), drafted=(3,), accepted=(3,))
    assert acceptance([ended])["tokens_per_pass"] == 3
    assert acceptance([Replay((3, 3), (3, 0))])["tokens_per_pass"] == 2.5


def test_without_drafts_there_is_no_rate() -> None:
    """Nothing tried is not 0 % accepted."""
    got = acceptance([answer()])
    assert (got["rate"], got["drafted"], got["by_position"], got["tokens_per_pass"]) == (None, 0, [], 1)


def test_a_replay_is_kept_apart_and_may_be_missing() -> None:
    row = speed.row([pair(drafted=(1, 0, 0, 0), accepted=(1, 0, 0, 0))], [Replay((3,), (2,))])
    assert (row["live"]["drafted"], row["oracle"]["drafted"]) == (1, 3)
    assert speed.row([pair()], [])["oracle"] is None


def test_energy_is_per_token_of_all_requests() -> None:
    row = speed.row([pair(answer(joules=3.0), joules=1.0), pair(answer(joules=1.0), joules=0.5)], [])
    assert (row["plain_mj_per_token"], row["mj_per_token"]) == (400.0, 150.0)
    assert speed.row([pair()], [])["mj_per_token"] is None
    still = speed.row([pair(answer(joules=0.0), joules=0.0)], [])
    assert still["mj_per_token"] is None and still["plain_mj_per_token"] is None


def test_ends_are_counted_by_reason() -> None:
    row = speed.row([pair(), pair(finish_reason="eos"), pair()], [])
    assert row["ended"] == {"length": 2, "eos": 1}


def test_drafter_time_is_per_token_of_the_middle_request() -> None:
    """A request that was interrupted while it drafted says nothing of the drafter."""
    row = speed.row([pair(drafter_seconds=0.001), pair(drafter_seconds=0.9), pair(drafter_seconds=0.003)], [])
    assert row["drafter_us_per_token"] == pytest.approx(600)


def test_a_pass_is_timed_by_its_width() -> None:
    """A draft of k tokens takes the narrowest width for k + 1; passes without drafts of a drafter count as well."""
    drafted = {"drafted": (3, 0, 1), "accepted": (1, 0, 1), "pass_seconds": (0.6, 0.9, 0.8)}
    plain = answer(drafted=(0, 0), accepted=(0, 0), pass_seconds=(0.5, 0.1))
    assert pass_seconds([pair(plain, **drafted)], (1, 4)) == pytest.approx({"1": 0.5, "4": 0.7})
    assert pass_seconds([pair(plain, **drafted)], (1, 2, 4)) == pytest.approx({"1": 0.5, "2": 0.8, "4": 0.6})
    assert pass_seconds([], (1, 4)) == {}


def test_prefill_speed_is_of_the_whole_prompt() -> None:
    assert PrefillSpeed(PROMPT, answer(prefill_seconds=0.5)).tokens_per_second == 6
