"""The host of a recurrence: what it folds and when, how far a text goes back, and mistakes in that are found out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import limits
import numpy as np
import pytest
from drafted_decoding import Session
from kit_runner.figures import relative_error
from numpy.typing import NDArray

from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models.caches import RING
from shardmill.models.contract import BLOCK
from shardmill.runtime.kv import Floats, KVLayout

from . import tiny_families as tiny
from .hosts import recurrent
from .recurrent_layers import WIDE
from .test_family_mutants import error

LIMIT = THRESHOLDS["program_error"].limit
TAPS = 4
FAMILIES = ("qwen3_5_text", "granitemoehybrid")  # gated DeltaNet and Mamba-2


def test_a_recurrence_goes_back_as_far_as_it_is_not_folded() -> None:
    """And always to the beginning of a text."""
    host = recurrent()
    for start in range(20):
        host.arrays([start], [start])
    assert host.folded == 16
    assert [host.rewindable(p) for p in (0, 1, 15, 16, 20, 21)] == [True, False, False, True, True, False]
    before = host.ring.copy()
    with pytest.raises(ValueError, match="position 15: the recurrence is folded up to 16; feed the text again"):
        host.arrays([15], [15])
    assert host.folded == 16 and np.array_equal(host.ring, before)  # refused, so nothing is marked
    assert not host.arrays([0], [0])["recurrent_keep_mask"].any() and host.folded == 0


@pytest.mark.parametrize("position", range(1, 20))
def test_as_many_tokens_can_be_undone_as_the_host_says(position: int) -> None:
    """And no more, or a draft model would have to read its text again."""
    host = recurrent()
    for start in range(position):
        host.arrays([start], [start])
    most = host.undoable(position)
    assert most is not None and 1 <= most <= BLOCK
    for start in range(position, position + most):
        host.arrays([start], [start])
    assert host.rewindable(position)
    host.arrays([position + most], [position + most])
    assert not host.rewindable(position)
    host.arrays([0], [0])
    assert recurrent().undoable(0) == BLOCK and host.undoable(1) == BLOCK - 1


def test_a_copy_belongs_to_the_position_up_to_which_its_state_is_folded() -> None:
    """Restored after another text, a pass goes on where the copy was made, and no further back."""
    host, other = recurrent(), recurrent()
    for start in range(20):
        host.arrays([start], [start])
    kept = host.rings()
    later = host.arrays([20], [20])
    for start in range(0, 40, 8):
        other.arrays(range(start, start + 8), range(start, start + 8))
    other.restore(0, 20, kept)
    assert [other.rewindable(p) for p in (15, 16, 20, 21)] == [False, True, True, False]
    again = other.arrays([20], [20])
    assert all(np.array_equal(later[name], again[name]) for name in later if "recurrent" in name or "conv" in name)


def test_a_session_goes_back_as_far_after_several_blocks() -> None:
    """To the beginning of the last block, which has at least a token."""
    for count in range(5, WIDE + 1):
        host = recurrent(narrow=4)
        host.arrays(range(3), range(3))
        host.arrays(range(3, 3 + count), range(3, 3 + count))
        assert host.folded == 3 + (count - 1) // BLOCK * BLOCK
        able = [p for p in range(1, 4 + count) if host.rewindable(p)]
        assert able == list(range(host.folded, 4 + count))
        assert host.undoable(3 + count) == host.folded + BLOCK - 3 - count or BLOCK


@pytest.mark.parametrize("at", [range(9), [0, 2], [1, 0]])
def test_positions_that_no_window_holds_are_refused(at: Any) -> None:
    with pytest.raises(ValueError, match="a recurrence takes up to 8 that follow one another"):
        recurrent().arrays(list(at), list(at))


def test_every_kept_position_is_folded_once() -> None:
    """By the first window, in order, whatever was rejected."""
    rng, host, folded, start = np.random.default_rng(0), recurrent(taps=TAPS), [], 0
    back = TAPS - 1
    while start < 80:
        at = np.arange(start, start + int(rng.integers(1, BLOCK + 1)))
        arrays = host.arrays(at.tolist(), at.tolist())
        read = arrays["recurrent_read_mask"][0, :, :, 0]
        first, second = (read[n * (BLOCK + back) : (n + 1) * (BLOCK + back)] for n in range(2))
        if first.any():  # the columns before the first of the block are for the convolution
            folded += [host.ring[slot] for slot in (row.argmax() for row in first[back:] if row.any())]
        assert host.folded == len(folded)
        places = arrays["recurrent_out_mask"][0, 0].argmax(axis=1)
        assert [host.ring[second[back + place].argmax()] for place in places] == at.tolist()
        start += int(rng.integers(1, len(at) + 1))
    assert folded == list(range(len(folded))) and len(folded) > 60


class WithRejected(KVLayout):
    """Folds all that the last pass fed, kept or not, as a state does that each pass writes."""

    end = 0

    def _recurrent_masks(self, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        folded, first = self.folded, int(at[0])
        found = super()._recurrent_masks(at, block, taps)
        for position in range(first, min(self.end, folded + block)) if self.folded > folded else ():
            found["recurrent_read_mask"][0, position - folded + taps - 1, position % RING, 0] = 1
        self.end = first + len(at)
        return found


class OffByOne(KVLayout):
    """Reads each position's neighbour from the ring."""

    def _recurrent_masks(self, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        found = super()._recurrent_masks(at, block, taps)
        read = np.roll(found["recurrent_read_mask"], 1, axis=2)
        return found | {"recurrent_read_mask": read}


class Forgetful(KVLayout):
    """Goes on with the state of the text before."""

    def _recurrent_masks(self, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        found = super()._recurrent_masks(at, block, taps)
        found["recurrent_keep_mask"][..., 0] = 1
        return found


@pytest.mark.thorough(but=["qwen3_5_text-WithRejected-0", "qwen3_5_text-OffByOne-0", "qwen3_5_text-Forgetful-30"])
@pytest.mark.parametrize(("host", "before"), [(WithRejected, 0), (OffByOne, 0), (Forgetful, 30)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mistake_of_the_host_is_found_out(family: str, host: type[KVLayout], before: int) -> None:
    assert error(family, host=host, before=before) > LIMIT
    limits.agrees(family, error(family, before=before), tiny.limit_of(tiny.tiny_model(family)))


class AnyPosition(KVLayout):
    """Goes back to any position, though the state already holds later ones."""

    def _foldable(self, position: int, block: int, taps: int) -> bool:
        return True

    def _recurrent_masks(self, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        self.folded = min(self.folded, int(at[0]))
        return super()._recurrent_masks(at, block, taps)


@pytest.mark.parametrize(("host", "wrong"), [(KVLayout, False), (AnyPosition, True)])
def test_a_prefix_of_another_text_is_fed_again_if_the_state_is_past_it(host: type[KVLayout], wrong: bool) -> None:
    """A session would go on after the shared prefix; the state must be of that position, or of none."""
    model = tiny.tiny_model("qwen3_5_text")
    engine: Any = tiny.Blocks(tiny.described(model), tiny.tensors_of(model), host=host)
    engine.rewindable = engine.host.rewindable
    engine.forget = engine.host.forget
    session, first = Session(engine), tiny.tiny_text(30)
    second = [*first[:14], *reversed(first[14:])]
    session.prefill(first)
    found = session.prefill(second)
    expected = tiny.expected(model, second)[-1]
    assert (relative_error(found.row[None], expected[None]) > LIMIT) == wrong
    assert found.reused == (14 if wrong else 0)
    kept = [*second[:28], *first[:2]]  # within what is not folded: nothing is fed again
    again = session.prefill(kept)
    assert wrong or again.reused == 28
    if not wrong:
        limits.rows_agree("fed again", again.row[None], tiny.expected(model, kept)[-1:], tiny.limit_of(model))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_of_two_thousand_tokens_does_not_drift(family: str) -> None:
    """One token a pass, and the error of the last tokens is no larger than of the first."""
    model, tokens = tiny.tiny_model(family, max_position_embeddings=2048), tiny.tiny_text(2000)
    engine: Any = tiny.Blocks(tiny.described(model, 2048), tiny.tensors_of(model), slots=2048)
    rows = np.concatenate([engine.forward(tokens[i : i + 1], [i], [i]) for i in range(len(tokens))])
    expected = tiny.expected(model, tokens)
    errors = [relative_error(rows[a:b], expected[a:b]) for a, b in pairwise(range(0, 2001, 500))]
    limits.agrees("the worst token", max(errors), tiny.limit_of(model))
    assert errors[-1] <= 4 * errors[0]
