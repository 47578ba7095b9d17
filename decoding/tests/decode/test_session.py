"""A session writes each token into its own slot, never past S, and exposes nothing that was not committed."""

from collections.abc import Sequence

import numpy as np
import pytest
from drafted_decoding.engine import DecodeError, PromptTooLongError
from drafted_decoding.layout import ContextPolicy
from drafted_decoding.session import Session

from .scripted import ScriptedEngine


def one_by_one(prompt: list[int]) -> np.ndarray:
    """Logits after `prompt`, fed token by token."""
    engine = ScriptedEngine(slots=512)
    for i, token in enumerate(prompt):
        rows = engine.forward([token], [i], [i])
    return rows[-1]


@pytest.mark.parametrize("length", range(1, 14))
def test_prefill_sees_exactly_the_prompt(length: int) -> None:
    prompt = list(range(3, 3 + length))
    prefill = Session(ScriptedEngine()).prefill(prompt)
    assert np.array_equal(prefill.row, one_by_one(prompt))


@pytest.mark.parametrize(
    ("widths", "length", "calls"),
    [
        ((1, 4), 8, [4, 4]),
        ((1, 4), 9, [4, 4, 1]),
        ((1, 4), 10, [4, 4, 4]),  # one padded pass beats two single ones
        ((1, 2, 4), 10, [4, 4, 2]),
        ((1, 2, 4), 11, [4, 4, 4]),
        ((1,), 3, [1, 1, 1]),
    ],
)
def test_prefill_takes_the_fewest_configured_passes(widths: tuple[int, ...], length: int, calls: list[int]) -> None:
    engine = ScriptedEngine(widths=widths)
    assert Session(engine).prefill(list(range(length))).passes == len(calls)
    assert [len(call) for call in engine.calls] == calls


def test_padding_never_writes_past_the_last_slot() -> None:
    engine = ScriptedEngine(slots=10)
    session = Session(engine)
    session.prefill(list(range(10)))
    assert [len(call) for call in engine.calls] == [4, 4, 1, 1]
    assert session.room() == 0
    with pytest.raises(DecodeError, match="do not fit"):
        session.feed([1])


def test_padding_is_not_exposed() -> None:
    session = Session(ScriptedEngine())
    session.prefill([5, 6])  # padded to 4
    row = session.feed([7])[0]
    assert np.array_equal(row, one_by_one([5, 6, 7]))


def test_rejected_tokens_are_hidden() -> None:
    session = Session(ScriptedEngine())
    session.prefill([5, 6, 7])
    session.feed([8, 9, 10, 11])
    session.commit(2)
    assert list(session.tokens) == [5, 6, 7, 8, 9]
    assert np.array_equal(session.feed([1])[0], one_by_one([5, 6, 7, 8, 9, 1]))


def test_a_fed_token_can_be_run_again_alone() -> None:
    session = Session(ScriptedEngine())
    session.prefill([5, 6, 7])
    rows = session.feed([8, 9, 10])
    assert np.array_equal(session.refeed(1), rows[1])
    session.commit(3)
    assert np.array_equal(session.feed([1])[0], one_by_one([5, 6, 7, 8, 9, 10, 1]))


def test_a_shared_prefix_is_not_run_again() -> None:
    engine = ScriptedEngine()
    session = Session(engine)
    session.prefill([1, 2, 3, 4, 5, 6, 7, 8])
    engine.calls.clear()
    prefill = session.prefill([1, 2, 3, 4, 9])
    assert (prefill.reused, prefill.passes) == (4, 1)
    assert np.array_equal(prefill.row, one_by_one([1, 2, 3, 4, 9]))


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5], [1, 2, 3], [9, 9]])
def test_reuse_gives_the_logits_of_a_fresh_session(prompt: list[int]) -> None:
    session = Session(ScriptedEngine())
    session.prefill([1, 2, 3, 4, 5])
    assert np.array_equal(session.prefill(prompt).row, one_by_one(prompt))


def test_wrong_requests_are_named() -> None:
    session = Session(ScriptedEngine(slots=8))
    with pytest.raises(PromptTooLongError, match="9 tokens, the context 8"):
        session.prefill(list(range(9)))
    with pytest.raises(DecodeError, match="prompt is empty"):
        session.prefill([])
    with pytest.raises(DecodeError, match="lack 1"):
        Session(ScriptedEngine(widths=(4,)))
    session.prefill([1])
    session.feed([2])
    with pytest.raises(DecodeError, match="2 tokens to commit"):
        session.commit(2)


def test_passes_whose_logits_nobody_asks_for_do_without_them() -> None:
    """All passes of a prompt but the last, where the engine can; slots and logits are the same."""
    engine, plain = ScriptedEngine(), ScriptedEngine()
    written: list[int] = []

    def write(tokens: list[int], slots: list[int], positions: list[int]) -> None:
        written.extend(positions)
        ScriptedEngine.forward(engine, tokens, slots, positions)

    engine.write = write  # type: ignore[attr-defined]
    prompt = list(range(1, 11))
    row, expected = Session(engine).prefill(prompt).row, Session(plain).prefill(prompt).row
    assert np.array_equal(row, expected)
    assert written == list(range(8))
    assert engine.calls == plain.calls


def test_what_an_engine_cannot_go_back_to_is_run_again() -> None:
    """A convolution keeps a few tokens only, so a shared prefix that ends before them is no use."""

    class Forgetful(ScriptedEngine):
        def rewindable(self, position: int) -> bool:
            return position >= 6

    text = list(range(10))
    session = Session(Forgetful())
    session.prefill(text)
    assert session.prefill([*text[:7], 30, 31]).reused == 7
    assert session.prefill([*text[:4], 40, 41]).reused == 0
    fresh = Session(ScriptedEngine()).prefill([*text[:4], 40, 41])
    assert np.array_equal(session.prefill([*text[:4], 40, 41]).row, fresh.row)
    assert Session(Forgetful()).prefill(text).held == 10


def test_an_engine_may_limit_what_can_be_undone() -> None:
    """A recurrence folds tokens; its engine says how many may follow before the state passes a position."""

    class Folding(ScriptedEngine):
        def undoable(self, position: int) -> int | None:
            return None if position < 4 else 9 - position

    session = Session(Folding(slots=64))
    session.prefill([1, 2, 3])
    assert session.undoable() == 61
    session.prefill([1, 2, 3, 4, 5])
    assert session.undoable() == 4


def test_an_engine_that_pads_gets_no_padding_in_a_wide_call() -> None:
    """Its recurrence would fold padding; in a call that may be rejected, padding does no harm."""

    class Padding(ScriptedEngine):
        verify, pads = 4, True

        def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> np.ndarray:
            fed.append(len(tokens))
            more = next(width for width in self.widths if width >= len(tokens)) - len(tokens)
            later = [*positions, *range(positions[-1] + 1, positions[-1] + 1 + more)]
            return super().forward([*tokens, *[0] * more], later, later)[: len(tokens)]

    fed: list[int] = []
    session, prompt = Session(Padding(slots=64, widths=(1, 4, 16))), list(range(3, 33))
    assert np.array_equal(session.prefill(prompt).row, one_by_one(prompt)) and fed == [16, 14]
    fed.clear()
    session.prefill(prompt[5:8])
    assert fed == [4]


class FittingEngine(ScriptedEngine):
    """Is told how many slots a text takes."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots=slots)
        self.told: list[tuple[int, int]] = []

    def fit(self, slots: int) -> None:
        self.told.append((slots, len(self.calls)))


@pytest.mark.parametrize("policy", ["stop", "slide"])
def test_an_engine_is_told_how_many_slots_a_prompt_takes_before_it_is_fed(policy: ContextPolicy) -> None:
    """With a decode pass after it, and never more than there are; with the prefix that is reused, too."""
    engine = FittingEngine(slots=32)
    session = Session(engine, context_policy=policy, block=4)
    session.prefill(list(range(3, 13)))
    before = len(engine.calls)
    session.prefill([3, 4, 5, 6, 49])
    again = len(engine.calls)
    session.prefill(list(range(3, 33)))
    assert engine.told == [(14, 0), (9, before), (32, again)]
