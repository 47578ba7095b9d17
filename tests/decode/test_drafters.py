"""What every drafter must do, and who says which cannot be made."""

import pytest

from shardmill.decode import DecodeError, Session, create_drafter
from shardmill.decode.drafters import DRAFTERS, RequestInfo

from .scripted import ScriptedEngine, repetitive
from .texts import text


@pytest.mark.parametrize("name", [n for n in DRAFTERS if n != "draft_model"])
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


@pytest.mark.parametrize("name", [n for n in DRAFTERS if n not in ("none", "draft_model")])
def test_a_new_request_forgets_the_last_text(name: str) -> None:
    drafter = create_drafter(name)
    drafter.reset([1, 2, 3, 1, 2], RequestInfo(private=True))
    drafter.finish()
    drafter.reset([7, 8, 9, 7])
    assert drafter.propose([7, 8, 9, 7], 2).tokens[:1] == (8,)
    assert not {1, 2, 3} & set(drafter.propose([7, 8, 9, 7], 3).tokens)


def draft_session(**settings: int) -> Session:
    return Session(ScriptedEngine(next_token=repetitive(50), **settings))


def test_drafters_that_cannot_be_made_are_named() -> None:
    with pytest.raises(DecodeError, match="no drafter is called 'magic'"):
        create_drafter("magic")
    with pytest.raises(DecodeError, match="needs a draft model"):
        create_drafter("draft_model")
    with pytest.raises(DecodeError, match="share a tokenizer"):
        create_drafter("draft_model", draft_session=draft_session(), vocab=51)
