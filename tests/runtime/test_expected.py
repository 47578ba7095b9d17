"""The numbers from which any machine makes the inputs of a check, and the passes in which it feeds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafted_decoding.engine import PlainEngine
from safetensors.numpy import save_file

from shardmill.errors import ShardmillError
from shardmill.files import dumps
from shardmill.gates.routed import Call, taken_in_turn
from shardmill.runtime import expected
from shardmill.runtime.expected import (
    PLACES,
    Answer,
    Recorded,
    below,
    first_answer,
    lengths_of,
    numbers,
    picked,
    read_expected,
    rows,
    shares,
    ways,
)


@pytest.mark.parametrize(
    ("seed", "first"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]),
    ],
)
def test_numbers_are_those_of_splitmix64(seed: int, first: list[int]) -> None:
    """As others have published them, and as docs/model-json.md describes them."""
    assert numbers(seed, 3).tolist() == first


def test_rows_follow_from_the_numbers_one_after_the_other() -> None:
    """The vectors of docs/model-json.md, which a runtime in another language compares with."""
    assert rows(7, -2, 2, 3).tolist() == [
        [-0.054931640625, -0.241455078125, 0.200439453125],
        [0.041259765625, -0.023681640625, -0.125244140625],
    ]
    assert below(7, 4, 1000) == [int(number) % 1000 for number in numbers(7, 4).tolist()]


def test_rows_take_the_experts_of_a_group_in_turn() -> None:
    """The vectors of docs/model-json.md."""
    assert shares(4, 3, 2).tolist() == [[0.25, 0.125, 0], [0.25, 0, 0.5], [0, 0.75, 0.375], [0.25, 0.125, 0]]
    routed = taken_in_turn(2, 7)(Call(torch.zeros(9, 1), torch.zeros(9, 2), torch.zeros(9, 2)))
    assert np.array_equal(shares(9, 5, 2), Call(torch.zeros(9, 1), *routed).share(2, 7).numpy())


@pytest.mark.parametrize("exponent", [-8, 0, 8])
def test_every_row_is_exact_in_fp16_and_within_its_bounds(exponent: int) -> None:
    found = rows(3, exponent, 50, 41)
    assert np.array_equal(found.astype(np.float16).astype(np.float32), found)
    assert np.abs(found).max() < 2.0**exponent and np.abs(found).min() > 0
    assert abs(np.median(np.abs(found)) / 2.0**exponent - 0.5) < 0.05 and abs((found > 0).mean() - 0.5) < 0.05


@pytest.mark.parametrize(
    ("widths", "slots", "whole", "fills", "wide", "last"),
    [
        ((1, 4), 64, 64, True, [(0, 4, 4), (4, 7, 4)], ([(0, 4, 4), (4, 5, 1), (5, 6, 1), (6, 7, 1)], 57)),
        ((1, 4, 64), 64, 128, True, [(0, 7, 64)], ([(0, 4, 4), (4, 5, 1), (5, 6, 1), (6, 7, 1)], 121)),
        ((1, 8), 64, 64, False, [(0, 7, 7)], ([(i, i + 1, 1) for i in range(7)], 57)),
        ((1, 64), 32, 32, True, [(0, 7, 7)], ([(i, i + 1, 1) for i in range(7)], 25)),  # no room for 64 tokens
        ((4, 8), 64, 64, True, [(0, 7, 8)], ([(0, 4, 4), (4, 7, 3)], 57)),
    ],
)
def test_a_sequence_is_fed_token_by_token_in_a_wide_pass_and_in_the_last_slots(
    widths: tuple[int, ...], slots: int, whole: int, fills: bool, wide: list[object], last: tuple[list[object], int]
) -> None:
    one, two, three = ways(7, widths, slots, whole, fills)
    assert (one.name, [*one.passes], one.offset) == ("T=1", [(i, i + 1, 1) for i in range(7)], 0)
    assert (two.name, [*two.passes], two.offset) == (f"T={widths[-1]}", wide, 0)
    assert (three.name, ([*three.passes], three.offset)) == ("the last slots", last)


def test_an_encoder_reads_one_token_a_few_and_a_full_bucket() -> None:
    assert lengths_of(16) == {"one token": [0], "7 tokens": [*range(7)], "a full bucket": [0, 2, 5, 7, 10, 12, 15]}
    assert lengths_of(3) == {"one token": [0], "3 tokens": [0, 1, 2], "a full bucket": [0, 1, 2]}


@pytest.mark.parametrize("about", [{}, {"about": "no JSON"}, {"about": dumps({"format": 2, "parts": {}})}])
def test_a_file_of_another_form_is_refused_in_one_line(about: dict[str, str], tmp_path: Path) -> None:
    save_file({"a/rows": np.zeros((1, 1), np.float32)}, tmp_path / "expected.safetensors", about or None)
    with pytest.raises(ShardmillError, match=r"expected results \(.*; pull or build again"):
        read_expected(tmp_path / "expected.safetensors")


LIMITS = {"fp32": 1e-4, "fp16": 1e-2}


@pytest.mark.parametrize(
    ("portable", "precision", "limit"), [(True, "fp32", "fp32"), (True, "fp16", "fp16"), (False, "fp32", "fp16")]
)
def test_each_precision_has_its_limit(
    portable: bool, precision: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Core ML computes in fp16 whatever is asked for."""
    monkeypatch.setattr(expected, "is_portable", lambda: portable)
    assert expected.limit(Recorded({}, LIMITS, {}), precision) == LIMITS[limit]


def test_a_logit_that_is_too_large_is_found_wherever_it_is() -> None:
    """Also where none was recorded: it would be the next token."""
    logits = rows(1, 0, 2, 5000)
    largest = np.argsort(-logits, axis=1)[:, :10].astype(np.int32)
    recorded = Recorded({"places": (3, 0)}, LIMITS, {}, largest)
    right = picked(logits, recorded)
    assert np.array_equal(right[:, -1], logits.max(axis=1)) and np.array_equal(right[:, PLACES], right[:, -1])
    elsewhere = next(i for i in range(5000) if i not in {*below(3, PLACES, 5000), *largest.ravel().tolist()})
    logits[1, elsewhere] = 2 * right[1, -1]
    assert [*np.flatnonzero((picked(logits, recorded) != right).any(axis=1))] == [1]


class Answering(PlainEngine):
    """An engine that says one token after the other, whatever it is fed."""

    slots, widths, verify, pads, vocab = 64, (1, 4), 4, False, 10

    def __init__(self, says: list[int]) -> None:
        self.says, self.fed = says, list[tuple[tuple[int, ...], tuple[int, ...]]]()

    def reset(self) -> None:
        """It holds nothing."""

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        """Remember what it is fed."""
        assert tuple(slots) == tuple(positions)
        self.fed.append((tuple(tokens), tuple(positions)))

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        """One-hot logits."""
        self.write(tokens, slots, positions)
        return np.eye(10, dtype=np.float32)[[self.says[positions[0] - 5]]]


ANSWER = Answer([1, 2, 3, 4, 5, 6], [7, 8, 9], [(0, 0.5), (1, 0.01), (2, 0.5)])


@pytest.mark.parametrize(
    ("says", "differs"),
    [
        ([7, 8, 9], ""),
        ([7, 1, 4], "near tie: token 2 is 1, not 8, 0.01 less likely in logits"),  # what follows is another text
        ([0, 8, 9], "token 1 is 0, not 7"),  # the rival, and not near
        ([7, 2, 9], "token 2 is 2, not 8"),  # near, and not the rival
    ],
)
def test_the_first_answer_may_differ_at_a_near_tie_only(says: list[int], differs: str) -> None:
    engine: Any = Answering(says)
    assert first_answer(engine, ANSWER, 0.1) == differs


def test_the_first_answer_is_a_prompt_in_wide_passes_and_tokens_one_by_one() -> None:
    """Each is fed as it was recorded, and a pass that is not full is filled up with its last token."""
    engine: Any = Answering([7, 8, 9])
    first_answer(engine, ANSWER, 0.1)
    prompt = [((1, 2, 3, 4), (0, 1, 2, 3)), ((5,), (4,))]
    assert engine.fed == [*prompt, ((6,), (5,)), ((7,), (6,)), ((8,), (7,))]
