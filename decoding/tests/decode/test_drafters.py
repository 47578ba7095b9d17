"""What every drafter must do and cannot do, and who says which cannot be made."""

from collections.abc import Sequence

import numpy as np
import pytest
from drafted_decoding import DecodeError, Options, Sampling, Session, create_drafter, run
from drafted_decoding.drafters import BY_ITSELF, Draft, RequestInfo
from drafted_decoding.generate import usable
from drafted_decoding.policies import CostModel

from .scripted import OracleDrafter, ScriptedEngine, repetitive
from .texts import text


@pytest.mark.parametrize("name", BY_ITSELF)
def test_drafts_keep_to_the_limit_and_to_known_tokens(name: str) -> None:
    tokens = text(3, 60)
    drafter = create_drafter(name)
    drafter.reset(tokens)
    for limit in (0, 1, 3):
        draft = drafter.propose(tokens, limit)
        assert len(draft.tokens) <= limit
        assert set(draft.tokens) <= set(tokens)
        assert all(0 <= c <= 1 for c in draft.confidence)
        assert len(draft.confidence) in (0, len(draft.tokens))


@pytest.mark.parametrize("name", [n for n in BY_ITSELF if n != "none"])
def test_a_new_request_forgets_the_last_text(name: str) -> None:
    drafter = create_drafter(name)
    drafter.reset([1, 2, 3, 1, 2], RequestInfo(private=True))
    drafter.finish()
    drafter.reset([7, 8, 9, 7])
    proposed = drafter.propose([7, 8, 9, 7], 3).tokens
    assert proposed and set(proposed) <= {7, 8, 9}


class Hostile(OracleDrafter):
    """Proposes what no engine could take, another way each time."""

    drafts = (
        Draft((50,)),
        Draft((-1,)),
        Draft((1 << 40, 3)),
        Draft((3, 60, 4), (0.9, 0.9, 0.9)),
        Draft(tuple(range(40))),
        Draft((3, 4), (float("nan"), 2.0)),
        Draft((3, 4), (-1.0, 0.5)),
        Draft((3, 4), (0.5,)),
        Draft((3,), distributions=np.ones((1, 60)) / 60),
        Draft((3, 4), distributions=np.ones((1, 50)) / 50),
        Draft((60,), distributions=np.ones((1, 50)) / 50),
    )

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        self._passes += 1
        return self.drafts[self._passes % len(self.drafts)]


class Trusting(CostModel):
    """Asks and verifies whatever comes, but learns from it as the default policy does."""

    def limit(self, most: int) -> int:
        return most

    def length(self, draft: Draft) -> int:
        super().length(draft)
        return len(draft.tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_drafter_can_break_decoding(temperature: float) -> None:
    """Tokens outside the vocabulary never reach the engine, nor does more than fits; the text is the plain one's."""
    options = Options(sampling=Sampling(temperature=temperature, seed=5, repetition_penalty=1.1))
    plain = run(Session(ScriptedEngine()), [1, 2, 3], max_new_tokens=80, options=options).tokens
    hostile = Hostile((), 50)
    result = run(
        Session(ScriptedEngine()),
        [1, 2, 3],
        max_new_tokens=80,
        drafter=hostile,
        policy=Trusting((1, 4)),
        options=options,
    )
    assert hostile._passes >= len(Hostile.drafts)
    assert result.tokens == plain


def test_a_cut_draft_keeps_what_belongs_to_its_tokens() -> None:
    drawn = np.eye(5, 50)
    whole = Draft((1, 2, 99, 4, 5), (0.9, 0.8, 0.7, 0.6, 0.5))
    assert usable(whole, 5, 50) == Draft((1, 2), (0.9, 0.8))
    assert usable(whole, 1, 50) == Draft((1,), (0.9,))
    kept = usable(Draft((1, 2, 99, 4, 5), distributions=drawn), 5, 50)
    assert kept.tokens == (1, 2) and kept.distributions is not None and np.array_equal(kept.distributions, drawn[:2])


def draft_session(**settings: int) -> Session:
    return Session(ScriptedEngine(next_token=repetitive(50), **settings))


def test_drafters_that_cannot_be_made_are_named() -> None:
    with pytest.raises(DecodeError, match="no drafter is called 'magic'"):
        create_drafter("magic")
    with pytest.raises(DecodeError, match="needs a draft model"):
        create_drafter("draft_model")
    with pytest.raises(DecodeError, match="share a tokenizer"):
        create_drafter("draft_model", draft_session=draft_session(), vocab=51)
