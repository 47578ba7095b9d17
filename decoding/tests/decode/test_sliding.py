"""A sliding window keeps its sinks, gives up its oldest tokens, and sees the same whatever was drafted."""

import numpy as np
import pytest
from drafted_decoding.drafters import create_drafter
from drafted_decoding.engine import DecodeError
from drafted_decoding.generate import run
from drafted_decoding.layout import Ring
from drafted_decoding.policies import AlwaysDraft
from drafted_decoding.session import Session

from .scripted import HIDDEN, OracleDrafter, ScriptedEngine, repetitive


def visible(engine: ScriptedEngine, position: int) -> list[int]:
    """Positions that a query at `position` sees."""
    return sorted(p for p in engine._position if p <= position)


def test_the_window_is_sinks_and_the_latest_tokens() -> None:
    engine = ScriptedEngine(slots=32)
    session = Session(engine, context_policy="slide", sinks=4, block=4)
    session.prefill([i % 50 for i in range(200)])
    seen = visible(engine, 199)
    assert seen[:4] == [0, 1, 2, 3]
    assert seen[4:] == list(range(seen[4], 200))
    assert len(seen) >= 32 - 4 - 4  # all slots but a block and a pass's lookahead


@pytest.mark.parametrize("slots", [24, 32, 50])
def test_output_does_not_depend_on_passes_or_drafts(slots: int) -> None:
    """The window of a token follows from its position alone, so any split gives the same tokens."""
    prompt = [i * 7 % 50 for i in range(45)]

    def decode(widths: tuple[int, ...], drafter: OracleDrafter | None = None) -> tuple[int, ...]:
        session = Session(ScriptedEngine(slots=slots, widths=widths), context_policy="slide", sinks=3, block=4)
        return run(session, prompt, max_new_tokens=120, drafter=drafter).tokens

    plain = decode((1, 4))
    assert decode((1, 4), OracleDrafter(plain, 50)) == plain
    assert decode((1, 4), OracleDrafter(plain, 50, spoil=False)) == plain
    assert decode((1, 2, 4), OracleDrafter(plain, 50)) == plain


@pytest.mark.parametrize("length", [10, 20, 33, 60])
def test_a_shared_prefix_is_reused_only_while_its_window_is_there(length: int) -> None:
    prompt = [i % 50 for i in range(60)]
    session = Session(ScriptedEngine(slots=32), context_policy="slide", sinks=4, block=4)
    session.prefill(prompt)
    other = [*prompt[:length], 7, 8]
    fresh = Session(ScriptedEngine(slots=32), context_policy="slide", sinks=4, block=4)
    assert np.array_equal(session.prefill(other).row, fresh.prefill(other).row)
    assert list(session.tokens) == other


def test_a_ring_never_overwrites_what_is_visible() -> None:
    """Holds for every position and lookahead: the property that exactness rests on."""
    for slots, sinks, lookahead, block in [(32, 4, 4, 4), (40, 0, 4, 7), (33, 5, 2, 3), (24, 4, 4, 8)]:
        ring = Ring(slots, sinks, lookahead, block)
        for position in range(300):
            first, room = ring.first_visible(position), ring.same_window(position)
            assert room is not None and room >= 1
            assert ring.first_visible(position + room - 1) == first
            assert ring.first_visible(position + room) > first
            kept = [ring.slot(p) for p in [*range(min(sinks, position)), *range(first, position)]]
            written = [ring.slot(p) for p in range(position, position + lookahead)]
            assert len(set(kept + written)) == len(kept) + len(written)


def test_a_ring_too_small_to_slide_is_refused() -> None:
    with pytest.raises(DecodeError, match="a context of 8 tokens is too small to slide"):
        Session(ScriptedEngine(slots=8), context_policy="slide", sinks=4, block=4)
    with pytest.raises(DecodeError, match="must be stop or slide"):
        Session(ScriptedEngine(), context_policy="roll")  # type: ignore[arg-type]


def test_without_forgetting_the_old_would_stay_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The visibility rule alone does not suffice for an exact window: `forget` is what hides a block."""
    engine = ScriptedEngine(slots=32)
    monkeypatch.setattr(engine, "forget", lambda slots: None)
    session = Session(engine, context_policy="slide", sinks=4, block=4)
    session.prefill([i % 50 for i in range(199)])
    layout = Ring(32, 4, 4, 4)
    assert any(4 <= p < layout.first_visible(198) for p in visible(engine, 198))
    assert HIDDEN not in engine._position


def test_a_sliding_draft_model_keeps_what_it_may_have_to_take_back() -> None:
    """Both contexts are far longer than their slots; drafts of the same model stay right throughout."""

    def session() -> Session:
        return Session(ScriptedEngine(slots=32, next_token=repetitive(50)), context_policy="slide", sinks=4, block=4)

    plain = run(session(), [1, 2, 3], max_new_tokens=150)
    drafter = create_drafter("draft_model", draft_session=session())
    drafted = run(session(), [1, 2, 3], max_new_tokens=150, drafter=drafter, policy=AlwaysDraft())
    assert drafted.tokens == plain.tokens
    assert sum(drafted.accepted) == sum(drafted.drafted)
    assert drafted.passes < 60
