"""The draft model proposes what it would say, and its cache holds what was accepted, no more."""

from collections.abc import Sequence
from typing import Any

import limits
import numpy as np
import pytest
from drafted_decoding import Session, create_drafter
from drafted_decoding.drafters import Draft, RequestInfo
from drafted_decoding.engine import Logits
from drafted_decoding.sampler import log_softmax

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


class FewRows(ScriptedEngine):
    """A head that drafts every fifth token only, and has no logits of others."""

    ids = np.arange(3, 50, 5)

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Logits:
        return super().forward(tokens, slots, positions)[:, self.ids]

    def follow(self, known: int) -> None:
        """It reads nothing of the model."""


def few_rows() -> FewRows:
    return FewRows(next_token=repetitive(50))


@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_a_greedy_draft_states_its_tokens_probabilities_without_a_softmax(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is its row's likeliest, and its probability that among the row's tokens."""
    rows: list[Logits] = []
    feed, prefill = Session.feed, Session.prefill

    def fed(self: Session, tokens: Sequence[int]) -> Logits:
        rows.append(feed(self, tokens)[0])
        return rows[-1][None]

    def filled(self: Session, prompt: Sequence[int]) -> Any:
        found = prefill(self, prompt)
        rows.append(found.row)
        return found

    def unused(*_: Any) -> Any:
        raise AssertionError("a distribution over the whole vocabulary")

    monkeypatch.setattr(Session, "feed", fed)
    monkeypatch.setattr(Session, "prefill", filled)
    monkeypatch.setattr("drafted_decoding.drafters.draft_model.probabilities", unused)
    drafter = create_drafter(name, draft_session=draft_session(), head=few_rows())
    drafter.reset([1, 2, 3])
    draft = drafter.propose([1, 2, 3], 3)
    ids = np.arange(50) if name == "draft_model" else FewRows.ids
    assert list(draft.tokens) == [int(ids[row.argmax()]) for row in rows]
    expected = [float(np.exp(log_softmax(row)).max()) for row in rows]
    assert draft.confidence == pytest.approx(expected, rel=limits.sums("fp32", 50).value) and len(expected) == 3


def test_a_draw_from_few_rows_is_a_distribution_over_every_token() -> None:
    drafter = create_drafter("eagle3", head=few_rows())
    drafter.reset([1, 2], RequestInfo(temperature=1.0, seed=3))
    draft = drafter.propose([1, 2], 3)
    assert draft.distributions is not None and draft.distributions.shape == (3, 50)
    assert np.array_equal(np.flatnonzero(draft.distributions.any(axis=0)), FewRows.ids)
    assert draft.distributions.sum(axis=1) == pytest.approx(1) and {*draft.tokens} <= {*FewRows.ids.tolist()}
