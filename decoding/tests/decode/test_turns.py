"""Texts that take turns of a few passes say what each says alone, whatever is set aside and taken back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from drafted_decoding import (
    DecodeError,
    GenerationResult,
    PrefixCache,
    Session,
    SetAside,
    create_drafter,
    generate,
    run,
    score_labels,
)
from drafted_decoding.decide import LabelScores
from drafted_decoding.policies import AlwaysDraft

from .scripted import ScriptedEngine
from .test_prefixes import (
    A_POSITION,
    KINDS,
    NEW,
    PLENTY,
    REST,
    SLOTS,
    CopyingEngine,
    RingEngine,
    said_alone,
    system,
)


class Text:
    """An answer that is taken some events at a time."""

    def __init__(self, session: Session, prompt: list[int], **more: Any) -> None:
        self.session, self.prompt = session, prompt
        self.events: Iterator[Any] = generate(session, prompt, max_new_tokens=NEW, policy=AlwaysDraft(), **more)
        self.copies: SetAside | None = None
        self.result: GenerationResult | None = None

    def turn(self, events: int) -> None:
        """Go on for some events; what has ended frees its copies."""
        if self.copies is not None:
            self.session.take_back(self.copies)
        for _ in range(events):
            event = next(self.events)
            if isinstance(event, GenerationResult):
                self.result = event
                if self.copies is not None:
                    self.session.drop(self.copies)
                return
        self.copies = self.session.set_aside(PLENTY, self.copies)
        assert self.copies is not None


@pytest.mark.parametrize("budget", [0, 2 * (A_POSITION * 100 + REST), PLENTY])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_in_turns_are_those_alone(kind: str, budget: int) -> None:
    """With prefixes kept or not, drafts that are rejected, and turns that end within a prompt."""
    rng = random.Random(budget)
    engine = KINDS[kind](slots=SLOTS, widths=(1, 2, 4))
    session = Session(engine, prefixes=PrefixCache(engine, budget) if budget else None)
    prompts = [system * (i % 2) + [rng.randrange(50) for _ in range(rng.randrange(1, 40))] for i in range(12)]
    texts = [
        Text(session, prompt, drafter=create_drafter(rng.choice(["none", "ngram", "suffix", "learned"])))
        for prompt in prompts
    ]
    waiting = list(texts)
    while waiting:
        text = rng.choice(waiting[:5])
        text.turn(rng.randrange(1, 9))
        if text.result is not None:
            waiting.remove(text)
    for text in texts:
        assert text.result is not None and text.result.tokens == said_alone(kind, text.prompt), text.prompt
    left = [key for key in engine.copies if key < 0]
    assert left == []  # a prefix cache has the others


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_run_twice(kind: str) -> None:
    """However many turns an answer takes; and what was copied of slots is not copied again."""
    rng = random.Random(4)
    prompts = [[rng.randrange(50) for _ in range(60)] for _ in range(3)]
    engine = KINDS[kind](slots=SLOTS, widths=(1, 4))
    session = Session(engine)
    texts = [Text(session, prompt) for prompt in prompts]
    while any(text.result is None for text in texts):
        for text in (text for text in texts if text.result is None):
            text.turn(2)
    alone = sum(len(p) // 4 + len(p) % 4 + NEW - 1 for p in prompts)
    assert len(engine.calls) <= alone
    assert engine.most <= len(prompts) * (A_POSITION * (60 + NEW) + 2 * engine.rest) + engine.rest


def test_what_can_not_be_copied_stays() -> None:
    """An engine without copies, a text that is too large, one that has slid, and a ring that is past its end."""
    plain = Session(ScriptedEngine(slots=64))
    plain.prefill([1, 2, 3])
    assert plain.set_aside(PLENTY) is None
    session = Session(CopyingEngine(slots=SLOTS))
    session.prefill([1, 2, 3])
    assert session.set_aside(3 * A_POSITION - 1) is None and session.set_aside(3 * A_POSITION) is not None
    sliding = Session(CopyingEngine(slots=SLOTS), context_policy="slide")
    sliding.prefill([1] * (SLOTS + 40))
    assert sliding.set_aside(PLENTY) is None
    ring = Session(RingEngine(slots=SLOTS, widths=(1, 4)))
    ring.prefill([1] * 40)
    for _ in range(4):
        ring.feed([1, 2, 3, 4])
        ring.commit(4)
    ring._tokens = ring._tokens[:40]
    assert ring.set_aside(PLENTY) is None


def test_a_text_that_is_still_there_is_not_copied_back() -> None:
    engine = CopyingEngine(slots=SLOTS)
    session = Session(engine)
    session.prefill([1, 2, 3])
    copies = session.set_aside(PLENTY)
    assert copies is not None
    engine.copy_in = None  # type: ignore[method-assign, assignment]
    session.take_back(copies)
    assert list(session.tokens) == [1, 2, 3]
    session.feed([4])
    with pytest.raises(TypeError):  # the slots hold one token more
        session.take_back(copies)


def test_a_text_that_was_cut_is_taken_back_whole() -> None:
    session = Session(CopyingEngine(slots=SLOTS))
    session.prefill([1, 2, 3])
    copies = session.set_aside(PLENTY)
    assert copies is not None
    session.truncate(1)
    session.take_back(copies)
    assert list(session.tokens) == [1, 2, 3]


def test_what_took_the_place_of_a_text_s_end_is_copied() -> None:
    """As between two labels: earlier copies of the text have other tokens there."""
    engine = CopyingEngine(slots=SLOTS)
    session = Session(engine)
    session.prefill(system)
    before = session.set_aside(PLENTY)
    session.truncate(9)
    text = [*system[:9], *range(20)]
    session.prefill(text)
    copies = session.set_aside(PLENTY, before)
    assert copies is not None
    session.prefill([9] * 50)
    session.take_back(copies)
    assert run(session, text, max_new_tokens=NEW).tokens == said_alone("slots", text)


def test_a_text_of_other_weights_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyingEngine, "adapt", lambda _, name: name or "", raising=False)
    session = Session(CopyingEngine(slots=SLOTS))
    session.prefill([1, 2, 3])
    copies = session.set_aside(PLENTY)
    assert copies is not None
    session.use_adapter("a")
    with pytest.raises(DecodeError, match="the adapter was replaced"):
        session.take_back(copies)
    session.use_adapter(None)
    session.take_back(copies)
    assert list(session.tokens) == [1, 2, 3]


def test_a_text_has_the_context_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that a prompt of as many tokens would get: a longer one could round otherwise."""
    fitted: list[int] = []
    monkeypatch.setattr(CopyingEngine, "fit", lambda _, slots: fitted.append(slots))
    session = Session(CopyingEngine(slots=SLOTS, widths=(1, 4)))
    session.prefill([1] * 10)
    for _ in range(3):
        session.feed([1])
        session.commit(1)
    copies = session.set_aside(PLENTY)
    assert copies is not None
    session.prefill([2] * 40)
    session.take_back(copies)
    assert fitted == [14, 44, 14]


def test_a_set_aside_text_leaves_no_end_among_kept_prefixes() -> None:
    """It goes on, so nobody would ask for that end, which has a rest."""
    engine = RingEngine(slots=SLOTS)
    session = Session(engine, prefixes=PrefixCache(engine, PLENTY))
    text = Text(session, system)
    text.turn(len(system) // 4 + 5)  # its prompt and a few tokens
    assert text.result is None and len(session.tokens) > len(system)
    session.prefill([1, 2, 3])
    assert sum(rest is not None for key, (*_, rest) in engine.copies.items() if key > 0) == 2  # of the two prompts


def test_a_drafter_s_text_goes_on_too() -> None:
    """Drafts of the same model stay right, whatever ran between."""
    rng = random.Random(3)
    session, drafts = (Session(CopyingEngine(slots=SLOTS, widths=(1, 4))) for _ in range(2))
    prompts = [[rng.randrange(50) for _ in range(30)] for _ in range(3)]
    texts = [Text(session, p, drafter=create_drafter("draft_model", draft_session=drafts)) for p in prompts]
    kept: dict[int, SetAside | None] = dict.fromkeys(range(3))
    while any(text.result is None for text in texts):
        for i, text in enumerate(texts):
            if text.result is None:
                if (copies := kept[i]) is not None:
                    drafts.take_back(copies)
                text.turn(3)
                kept[i] = drafts.set_aside(PLENTY, kept[i])
    for text in texts:
        assert text.result is not None and text.result.accepted == text.result.drafted
        assert sum(text.result.drafted) > 0


def test_a_private_text_stays_private() -> None:
    engine = CopyingEngine(slots=SLOTS)
    session = Session(engine, prefixes=PrefixCache(engine, PLENTY))
    for _ in session.prefill_passes(system, private=True):
        pass
    copies = session.set_aside(PLENTY)
    assert copies is not None
    session.prefill([1, 2, 3])
    session.take_back(copies)
    session.feed([5])
    session.commit(1)
    session.prefill([1, 2, 3])
    assert [key for key in engine.copies if key > 0] == []


def test_a_session_that_is_cleared_takes_texts_back() -> None:
    engine = RingEngine(slots=SLOTS)
    session = Session(engine)
    text = Text(session, system)
    text.turn(20)
    session.clear()
    session.prefill([1, 2, 3])
    text.turn(10**6)
    assert text.result is not None and text.result.tokens == said_alone("rings", system)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_scored_in_turns(kind: str) -> None:
    """Between labels the session goes back to the prompt, so a copy may have more than is left."""
    labels = [(1,), (1, 2), (3, 4, 5), (3, 4, 6), (7, 8, 9, 10)]

    def scored(session: Session, other: list[int] | None) -> LabelScores:
        copies = None
        for event in score_labels(session, system, labels):
            if isinstance(event, LabelScores):
                return event
            if other:
                copies = session.set_aside(PLENTY, copies)
                assert copies is not None
                session.prefill(other)
                session.take_back(copies)
        raise AssertionError

    alone = scored(Session(KINDS[kind](slots=SLOTS)), None)
    assert scored(Session(KINDS[kind](slots=SLOTS)), [9, 9, 9] * 20).logprobs == alone.logprobs
