"""Prompts may be fed by wider passes than decoding takes: the text stays the same, and drafts stay as short."""

from collections.abc import Sequence

import numpy as np
import pytest
from drafted_decoding import measure_widths
from drafted_decoding.drafters import create_drafter
from drafted_decoding.engine import DecodeError
from drafted_decoding.generate import run
from drafted_decoding.layout import AppendOnly, ContextPolicy, Ring
from drafted_decoding.policies import AlwaysDraft, CostModel
from drafted_decoding.session import Session

from .scripted import OracleDrafter, ScriptedEngine, repetitive

PROMPT = [i * 7 % 50 for i in range(45)]


class WideEngine(ScriptedEngine):
    """Takes prompts by more tokens than decode passes have."""

    def __init__(self, *, slots: int = 256, widths: Sequence[int] = (1, 4, 16), verify: int = 4) -> None:
        super().__init__(slots=slots, widths=widths)
        self.verify = verify


def narrow(slots: int = 256) -> ScriptedEngine:
    """The same without the wide passes."""
    return ScriptedEngine(slots=slots, widths=(1, 4))


@pytest.mark.parametrize(
    ("length", "calls"),
    [
        (1, [1]),
        (5, [4, 1]),  # a wide pass costs more than two narrow ones
        (12, [4, 4, 4]),
        (16, [64]),  # but not more than four
        (64, [64]),
        (69, [64, 4, 1]),
        (110, [64, 64]),
        (128, [64, 64]),
    ],
)
def test_the_rest_of_a_prompt_takes_the_passes_that_cost_least(length: int, calls: list[int]) -> None:
    engine = WideEngine(widths=(1, 4, 64))
    prefill = Session(engine).prefill([i % 50 for i in range(length)])
    assert [len(call) for call in engine.calls] == calls
    assert (prefill.passes, prefill.width) == (len(calls), calls[-1])


@pytest.mark.parametrize("verify", [1, 3, 4, 5])
def test_decode_passes_keep_to_verify(verify: int) -> None:
    """Whatever the drafter offers; a width between the two is none of an engine that has it not."""
    engine = WideEngine(widths=(1, 3, 4, 16), verify=verify)
    session, most = Session(engine), {1: 1, 3: 3, 4: 4, 5: 4}[verify]
    plain = run(Session(narrow()), PROMPT, max_new_tokens=60).tokens
    session.prefill(PROMPT)
    assert max(len(call) for call in engine.calls) == 16
    engine.calls.clear()
    found = run(session, PROMPT, max_new_tokens=60, drafter=OracleDrafter(plain, 50, spoil=False), policy=AlwaysDraft())
    assert max(len(call) for call in engine.calls) == most == session.room()
    assert max(found.drafted) == most - 1
    assert found.tokens == plain
    with pytest.raises(DecodeError, match="do not fit"):
        session.feed([1] * (most + 1))


def test_an_engine_that_says_nothing_decodes_by_all_its_widths() -> None:
    session = Session(ScriptedEngine(widths=(16, 1, 4)))
    assert session.widths == (1, 4, 16) and session.room() == 16
    session.feed([1] * 16)


@pytest.mark.parametrize("policy", ["stop", "slide"])
@pytest.mark.parametrize("slots", [48, 61])
@pytest.mark.parametrize("length", [1, 4, 13, 17, 33, 45])
def test_the_text_is_that_of_narrow_prompts(policy: ContextPolicy, slots: int, length: int) -> None:
    """With drafts, with a context that ends or slides, and with another request before it that shares a prefix."""
    new = 120 if policy == "slide" else 50

    def decode(engine: ScriptedEngine, drafter: OracleDrafter | None = None) -> list[tuple[int, ...]]:
        session = Session(engine, context_policy=policy, sinks=3, block=8 if policy == "slide" else None)
        prompts = (PROMPT[:length], [*PROMPT[: length // 2], 9, 9, 8], [*PROMPT[:length], 5])
        return [run(session, prompt, max_new_tokens=new, drafter=drafter).tokens for prompt in prompts]

    plain = decode(ScriptedEngine(slots=slots, widths=(1, 4)))
    wide = WideEngine(slots=slots)
    assert decode(wide) == plain
    assert decode(WideEngine(slots=slots), OracleDrafter(plain[0], 50)) == plain
    if length > 16:
        assert 16 in {len(call) for call in wide.calls}


def test_a_long_prompt_slides_by_wide_passes() -> None:
    """Up to where the window moves, again and again; each row is that of single tokens."""
    prompt = [i * 3 % 50 for i in range(300)]
    engine = WideEngine(slots=64)
    row = Session(engine, context_policy="slide", sinks=4, block=16).prefill(prompt).row
    expected = Session(narrow(64), context_policy="slide", sinks=4, block=16).prefill(prompt).row
    assert np.array_equal(row, expected)
    assert sum(len(call) == 16 for call in engine.calls) >= 15


def test_padding_of_a_wide_pass_leaves_alone_what_is_seen() -> None:
    """The property that it rests on: so many positions may be written, and the next one takes a slot that is seen."""
    for slots, sinks, lookahead, block in [(32, 4, 4, 4), (40, 0, 4, 7), (33, 5, 2, 3), (24, 4, 4, 8)]:
        ring = Ring(slots, sinks, lookahead, block)
        for position in range(300):
            kept = {
                ring.slot(p) for p in [*range(min(sinks, position)), *range(ring.first_visible(position), position)]
            }
            free = ring.writable(position)
            assert free >= lookahead
            written = [ring.slot(p) for p in range(position, position + free)]
            assert len(set(written)) == free and not kept & set(written)
            taken = ring.slot(position + free)
            assert taken in kept or taken in written
    assert [AppendOnly(10).writable(p) for p in (0, 9, 10, 11)] == [10, 1, 0, 0]


def test_a_rest_near_the_end_of_the_context_takes_what_fits() -> None:
    engine = WideEngine(slots=54, widths=(1, 4, 32))
    Session(engine).prefill([i % 50 for i in range(54)])
    assert [len(call) for call in engine.calls] == [32, 4, 4, 4, 4, 4, 1, 1]


def test_the_cost_model_learns_nothing_of_prompts_widths() -> None:
    """They are called once, as first calls may be slow, and neither measured then nor timed in a request."""
    engine = WideEngine()
    costs = measure_widths(engine, repeats=2)
    assert set(costs) == {1, 4}
    assert sorted(len(call) for call in engine.calls) == [1, 1, 1, 4, 4, 4, 16]

    class Watched(CostModel):
        def __init__(self) -> None:
            super().__init__((1, 4), costs=costs)
            self.widths = list[int]()

        def timed(self, width: int, seconds: float) -> None:
            self.widths.append(width)
            super().timed(width, seconds)

    policy = Watched()
    session = Session(engine)
    run(session, PROMPT[:16], max_new_tokens=20, policy=policy, drafter=create_drafter("ngram"))  # by one wide pass
    assert policy.widths == []
    run(session, [*PROMPT[:15], 1, 2, 3], max_new_tokens=20, policy=policy, drafter=create_drafter("ngram"))
    assert policy.widths == [4]
    assert run(session, PROMPT, max_new_tokens=20, drafter=create_drafter("ngram")).tokens  # by the default policy


def test_a_draft_model_with_wide_passes_drafts_right() -> None:
    """Its prompt is fed by wide passes too, and cut back to what was accepted."""

    def engine(kind: type[ScriptedEngine]) -> ScriptedEngine:
        made = kind(slots=64)
        made._next_token = repetitive(50)
        return made

    def session(kind: type[ScriptedEngine]) -> Session:
        return Session(engine(kind), context_policy="slide", sinks=4, block=8)

    plain = run(session(ScriptedEngine), PROMPT, max_new_tokens=150)
    drafter = create_drafter("draft_model", draft_session=session(WideEngine))
    drafted = run(session(WideEngine), PROMPT, max_new_tokens=150, drafter=drafter, policy=AlwaysDraft())
    assert drafted.tokens == plain.tokens
    assert sum(drafted.accepted) == sum(drafted.drafted)
