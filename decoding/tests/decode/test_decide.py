"""Labels get the probabilities of whole sequences, counted here a second time from an engine that sees all it may."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import limits
import numpy as np
import pytest
from drafted_decoding import (
    DecodeError,
    LabelCalibration,
    LabelScores,
    NotFiniteError,
    Session,
    label_probabilities,
    score_labels,
)
from drafted_decoding.decide import Label
from numpy.typing import NDArray

from .scripted import ScriptedEngine

PROMPT = [3, 1, 4, 1, 5, 9, 2]
# One token, several, more than a pass takes, labels that begin alike, and one that others continue.
LABELS: list[Label] = [(7,), (8, 9), (8, 9, 1, 2, 3, 4, 5, 6), (8, 9, 1, 7), (10, 11, 12), (10, 11, 13), (8,)]
EXACT = limits.sums("fp64", 50)  # exponentials of a vocabulary of 50


def scores(session: Session, prompt: Sequence[int], labels: Sequence[Label], *, logprobs: bool = True) -> LabelScores:
    *_, last = score_labels(session, prompt, labels, logprobs=logprobs)
    assert isinstance(last, LabelScores)
    return last


class Restricted(ScriptedEngine):
    """An engine that also gives the logits of a few tokens alone; `few` has a flag for each call."""

    labels = (9, 2, 30, 7)

    def __init__(self, **settings: Any) -> None:
        self.few: list[bool] = []
        super().__init__(**settings)

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        self.few.append(False)
        return super().forward(tokens, slots, positions)

    def forward_labels(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> NDArray[np.float32]:
        self.few.append(True)
        return super().forward(tokens, slots, positions)[:, list(self.labels)]


def alone(text: Sequence[int], token: int) -> float:
    """The log-probability of a token after a text, fed to a fresh engine token by token."""
    engine = ScriptedEngine(widths=(1,))
    for i, one in enumerate(text):
        row = engine.forward([one], [i], [i])[-1].astype(np.float64)
    return float(row[token] - np.log(np.exp(row).sum()))


def whole(prompt: Sequence[int], label: Label) -> float:
    return sum(alone([*prompt, *label[:i]], token) for i, token in enumerate(label))


@pytest.mark.parametrize("widths", [(1,), (1, 2, 4), (1, 16)])
def test_a_label_has_the_probability_of_its_whole_sequence(widths: tuple[int, ...]) -> None:
    """Whatever labels stand beside it, and whatever ran before."""
    session = Session(ScriptedEngine(widths=widths))
    for _ in range(2):  # the second time the session holds the last label's tokens
        found = scores(session, PROMPT, LABELS)
        limits.numbers_agree("labels", found.logprobs, [whole(PROMPT, label) for label in LABELS], EXACT)
    for label, logprob in zip(LABELS, found.logprobs, strict=True):
        limits.numbers_agree("a label alone", scores(session, PROMPT, [label]).logprobs[0], logprob, EXACT)


def test_a_label_that_others_continue_has_what_they_leave() -> None:
    """The events exclude each other, so no probability counts twice."""
    found = scores(Session(ScriptedEngine()), PROMPT, LABELS)
    p = dict(zip(LABELS, np.exp(found.logprobs), strict=True))
    left = dict(zip(LABELS, np.exp(found.exclusive), strict=True))
    assert left[8,] == pytest.approx(p[8,] - p[8, 9])
    assert left[8, 9] == pytest.approx(p[8, 9] - p[8, 9, 1, 7] - p[8, 9, 1, 2, 3, 4, 5, 6])
    assert all(left[label] == pytest.approx(p[label]) for label in LABELS if label not in ((8,), (8, 9)))
    every = [(token,) for token in range(50)]
    assert math.fsum(np.exp(scores(Session(ScriptedEngine()), PROMPT, every).exclusive)) == pytest.approx(1)


def test_labels_that_an_engine_gives_alone_have_the_same_probabilities() -> None:
    """The last pass of the prompt alone gives no other logits; what ran before, and what comes after, is the same."""
    engine, names = Restricted(widths=(1, 4)), ["seven", "nine", "thirty"]
    session, labels = Session(engine), [(7,), (9,), (30,)]
    for calibration in (None, LabelCalibration(1.7, {"nine": -0.5})):
        plain = scores(Session(Restricted()), PROMPT, labels)
        found = scores(session, PROMPT, labels, logprobs=False)
        expected = label_probabilities(plain, names, calibration)
        limits.numbers_agree("probabilities", label_probabilities(found, names, calibration), expected, EXACT)
        assert found.logprobs == () and len(plain.logprobs) == 3
    assert engine.few == [False, True, True]  # both passes of the prompt, and then its last token again
    again = scores(session, [*PROMPT, 7, 1, 2], LABELS)
    limits.numbers_agree("after more", again.logprobs, [whole([*PROMPT, 7, 1, 2], label) for label in LABELS], EXACT)


@pytest.mark.parametrize(
    ("labels", "logprobs"),
    [([(7,), (9,)], True), ([(7,), (8,)], False), ([(7,), (9, 2)], False), ([(7,), (7, 9)], False)],
)
def test_other_labels_take_the_whole_head(labels: list[Label], logprobs: bool) -> None:
    """A label that the engine does not give alone, one of several tokens, and log-probabilities."""
    engine = Restricted()
    found = scores(Session(engine), PROMPT, labels, logprobs=logprobs)
    expected = scores(Session(ScriptedEngine()), PROMPT, labels)
    assert found.exclusive == expected.exclusive and found.logprobs == (expected.logprobs if logprobs else ())
    assert not any(engine.few)


def test_a_logit_of_a_label_that_is_not_finite_is_an_error() -> None:
    class Broken(Restricted):
        def forward_labels(self, *given: Any) -> NDArray[np.float32]:
            return super().forward_labels(*given) * np.float32(np.nan)

    session = Session(Broken())
    with pytest.raises(NotFiniteError):
        scores(session, PROMPT, [(7,), (9,)], logprobs=False)
    assert not session.tokens


def test_a_prompt_runs_once_for_all_labels() -> None:
    """Labels of one token take no pass; labels that begin alike run their common tokens once."""
    engine = ScriptedEngine(widths=(1, 4))
    session = Session(engine)
    assert scores(session, PROMPT, [(token,) for token in range(20)]).passes == len(engine.calls) == 2
    engine.calls.clear()
    found = scores(session, PROMPT, [(10, 11, 12, 1), (10, 11, 12, 2), (10, 11, 13, 1), (7, 7)])
    fed = [(call[0], len(call)) for call in engine.calls]
    assert fed == [(6, 1), (7, 1), (7, 4), (9, 1)]  # the prompt's end; 7; 10 11 12 and padding; 13
    assert found.passes == 4 and found.reused_tokens == len(PROMPT) - 1


def test_an_engine_that_can_not_go_back_runs_the_prompt_again() -> None:
    """A ring that has overtaken the prompt's end is such an engine."""

    class Forward(ScriptedEngine):
        def rewindable(self, position: int) -> bool:
            return position == max((call[-1] for call in self.calls), default=-1) + 1

    labels = [(8, 9, 1, 2, 3, 4), (9, 1)]
    *events, found = score_labels(Session(Forward(widths=(1,))), PROMPT, labels)
    assert isinstance(found, LabelScores)
    limits.numbers_agree("labels", found.logprobs, [whole(PROMPT, label) for label in labels], EXACT)
    assert found.passes == len(events) == len(PROMPT) * 2 + 5 + 1  # a caller may stop after each


def test_a_sliding_context_scores_labels_beyond_its_slots() -> None:
    prompt = [i % 7 for i in range(90)]
    engine = ScriptedEngine(slots=64)
    found = scores(Session(engine, context_policy="slide"), prompt, [(8, 9, 1), (8, 9, 2), (7,)])
    again = [
        scores(Session(ScriptedEngine(slots=64), context_policy="slide"), prompt, [one]).logprobs[0]
        for one in [(8, 9, 1), (8, 9, 2), (7,)]
    ]
    limits.numbers_agree("labels", found.logprobs, again, EXACT)


@pytest.mark.parametrize(
    ("prompt", "labels", "says"),
    [
        ([], [(1,)], "the prompt is empty"),
        (PROMPT, [], "one token or more"),
        (PROMPT, [(1,), ()], "one token or more"),
        (PROMPT, [(1, 2), (1, 2)], "no two may have the same"),
        ([1] * 9, [(1,), (1, 2, 3)], "11 tokens, the context 10"),
        (PROMPT, [(50, 1)], "outside the vocabulary"),
        (PROMPT, [(1,), (50,)], "a label holds a token outside the vocabulary of 50"),
    ],
)
def test_what_can_not_be_scored_is_refused_before_a_pass(prompt: list[int], labels: list[Label], says: str) -> None:
    engine = ScriptedEngine(slots=10)
    with pytest.raises(DecodeError, match=says):
        scores(Session(engine), prompt, labels)
    assert not engine.calls


def test_the_last_token_of_a_label_needs_no_slot() -> None:
    (found,) = scores(Session(ScriptedEngine(slots=10)), [1] * 9, [(1, 2)]).logprobs
    assert found == pytest.approx(whole([1] * 9, (1, 2)))


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shares = np.exp(logits - logits.max())
    return np.asarray(shares / shares.sum())


def test_a_calibration_is_a_temperature_and_a_bias_of_each_label() -> None:
    """Against a softmax; without one, probabilities are the model's."""
    found = scores(Session(ScriptedEngine()), PROMPT, LABELS)
    logits = np.array(found.exclusive, np.float64)
    names = [f"label {i}" for i in range(len(LABELS))]
    plain = label_probabilities(found, names)
    limits.numbers_agree("probabilities", plain, softmax(logits), EXACT)
    assert plain.sum() == pytest.approx(1)
    changed = label_probabilities(found, names, LabelCalibration(2.5, {"label 1": 3.0, "unknown": 9.0}))
    logits = logits / 2.5
    logits[1] += 3.0
    limits.numbers_agree("calibrated probabilities", changed, softmax(logits), EXACT)
    assert np.abs(changed - plain).max() > 0.05
