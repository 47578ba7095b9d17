"""The draft model proposes what it would say, and its cache holds what was accepted, no more."""

import pytest

from shardmill.decode import Session, create_drafter
from shardmill.decode.drafters import Draft, RequestInfo

from .scripted import ScriptedEngine, repetitive


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
