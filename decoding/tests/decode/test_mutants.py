"""Classic slips of speculative decoding, put in on purpose: the suite's exactness check must see each of them."""

import sys
from collections.abc import Callable, Collection, Sequence

import pytest
from drafted_decoding import DecodeError, Session, create_drafter, run
from drafted_decoding.drafters.draft_model import DraftModelDrafter
from drafted_decoding.generate import Outcome, accept
from drafted_decoding.policies import AlwaysDraft

from .scripted import OracleDrafter, ScriptedEngine, repetitive

PROMPT = [2, 1, 0, 1, 2]
Choose = Callable[[int], int]


def engine() -> ScriptedEngine:
    """Three tokens only: wrong comparisons are often right by chance, and go on from there."""
    return ScriptedEngine(vocab=3)


def decode(*, spoil: bool, eos: Collection[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(plain tokens, tokens with drafts that are sometimes wrong)."""
    truth = run(Session(engine()), PROMPT, max_new_tokens=50, eos=eos).tokens
    ahead = run(Session(engine()), PROMPT, max_new_tokens=60).tokens
    drafter = OracleDrafter(ahead, 3, spoil=spoil)
    drafted = run(Session(engine()), PROMPT, max_new_tokens=50, eos=eos, drafter=drafter, policy=AlwaysDraft())
    return truth, drafted.tokens


def broken(*, spoil: bool = True, eos: Collection[int] = ()) -> bool:
    """Whether the exactness check fails; an engine that refuses a call counts."""
    try:
        truth, drafted = decode(spoil=spoil, eos=eos)
    except AssertionError:
        return True
    return truth != drafted


def seeds_loop(choose: Choose, draft: Sequence[int], eos: Collection[int], ends: object = None) -> Outcome:
    """The published loop: takes row 0 unseen, compares row i with draft i - 1."""
    tokens: list[int] = []
    for i in range(len(draft) + 1):
        predicted = choose(i)
        if i == 0 or predicted == draft[i - 1]:
            tokens.append(predicted)
        else:
            break
    return Outcome(tuple(tokens), len(tokens) - 1)


def bonus_from_the_wrong_row(
    choose: Choose, draft: Sequence[int], eos: Collection[int], ends: object = None
) -> Outcome:
    """Always takes the bonus token from the last row."""
    accepted = 0
    while accepted < len(draft) and choose(accepted) == draft[accepted]:
        accepted += 1
    return Outcome((*draft[:accepted], choose(len(draft))), accepted)


def eos_ignored(choose: Choose, draft: Sequence[int], eos: Collection[int], ends: object = None) -> Outcome:
    """Goes on behind an accepted EOS."""
    accepted = 0
    while accepted < len(draft) and choose(accepted) == draft[accepted]:
        accepted += 1
    tokens = (*draft[:accepted], choose(accepted))
    return Outcome(tokens, accepted)


@pytest.mark.parametrize("mutant", [seeds_loop, bonus_from_the_wrong_row])
def test_a_wrong_acceptance_loop_is_caught(monkeypatch: pytest.MonkeyPatch, mutant: object) -> None:
    assert not broken()
    monkeypatch.setattr(sys.modules["drafted_decoding.generate"], "accept", mutant)
    assert broken()


def test_an_eos_ignored_mid_draft_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict must end at the EOS: a bonus token behind it would be emitted, or its slots kept."""
    eos = 0

    def verdict(accept: Callable[..., Outcome]) -> Outcome:
        return accept(lambda i: (7, eos, 8, 9)[i], (7, eos, 8), {eos})

    assert verdict(accept).tokens == (7, eos)
    assert verdict(eos_ignored).tokens != (7, eos)


@pytest.mark.parametrize("kept", ["all that was fed", "one too many", "one too few"])
def test_a_rejected_slot_left_exposed_is_caught(monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    commit = Session.commit

    def wrong(self: Session, count: int) -> None:
        fed = len(self._fed)
        wrong_count = {"all that was fed": fed, "one too many": min(fed, count + 1)}.get(kept, max(1, count - 1))
        commit(self, wrong_count if len(self.tokens) > len(PROMPT) else count)

    assert not broken()
    monkeypatch.setattr(Session, "commit", wrong)
    assert broken()


def test_slots_behind_the_rejected_ones_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the next tokens behind rejected ones, with right positions, leaves two slots of one position."""
    feed = Session.feed
    offset = 0

    def shifted(self: Session, tokens: Sequence[int]):  # type: ignore[no-untyped-def]
        nonlocal offset
        own = self._engine
        forward = type(own).forward
        offset += len(tokens) > 1
        monkeypatch.setattr(own, "forward", lambda t, s, p: forward(own, t, [x + offset for x in s], p), raising=False)
        return feed(self, tokens)

    monkeypatch.setattr(Session, "feed", shifted)
    assert broken()


def draft_passes(monkeypatch: pytest.MonkeyPatch | None) -> int:
    """Passes with a draft model that is right unless its own noise strikes."""
    target = repetitive(50, noise=1 << 30)
    own = repetitive(50, noise=6)
    drafter = create_drafter("draft_model", draft_session=Session(ScriptedEngine(next_token=own)))
    assert isinstance(drafter, DraftModelDrafter)
    if monkeypatch is not None:
        monkeypatch.setattr(drafter._session, "truncate", lambda length: length)
    result = run(
        Session(ScriptedEngine(next_token=target)),
        PROMPT,
        max_new_tokens=80,
        drafter=drafter,
        policy=AlwaysDraft(),
    )
    held = list(drafter._session.tokens)
    assert held == [*PROMPT, *result.tokens][: len(held)], "the draft cache holds what was never accepted"
    return result.passes


def test_a_draft_cache_that_is_not_trimmed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draft_passes(None) < 50
    with pytest.raises((AssertionError, DecodeError)):
        draft_passes(monkeypatch)
