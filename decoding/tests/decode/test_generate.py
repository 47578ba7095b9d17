"""Generation gives plain decoding's tokens whatever drafts, and ends for the right reason."""

from typing import Any

import limits
import numpy as np
import pytest
from drafted_decoding import (
    DRAFTERS,
    POLICIES,
    DecodeError,
    GenerationResult,
    Options,
    PrefillEvent,
    Sampling,
    Session,
    TokenEvent,
    create_drafter,
    create_policy,
    generate,
    run,
)
from drafted_decoding.drafters import Draft, Drafter
from drafted_decoding.generate import Outcome, accept, agreement
from drafted_decoding.policies import AlwaysDraft

from .clock import Clock, Fortune, TimedEngine, clock
from .scripted import OracleDrafter, ScriptedEngine, chaotic, repetitive

__all__ = ["clock"]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SCRIPTS = {"chaotic": chaotic(50), "repetitive": repetitive(50)}


def session(script: str = "chaotic", **settings: int) -> Session:
    return Session(ScriptedEngine(next_token=SCRIPTS[script], **settings))


def plain(script: str = "chaotic", count: int = 60) -> tuple[int, ...]:
    """What the engine says one token at a time, without any of the code under test."""
    engine = ScriptedEngine(next_token=SCRIPTS[script])
    text = list(PROMPT)
    for position in range(len(PROMPT) + count):
        row = engine.forward([text[position]], [position], [position])
        if position + 1 >= len(PROMPT):
            text.append(int(np.argmax(row[-1])))
    return tuple(text[len(PROMPT) :][:count])


class ScriptedHead(ScriptedEngine):
    """A head, or an assistant, that reads no hidden states."""

    @property
    def ids(self) -> Any:
        return np.arange(self.vocab)

    def follow(self, known: int) -> None:
        assert known > 0

    def draft(self, token: int, position: int, count: int) -> tuple[list[int], list[float]]:
        found = [token]
        for at in range(position, position + count):
            found.append(self._next_token(((at, found[-1]),)))
        return found[1:], [0.5] * count


def make_drafter(name: str) -> Drafter:
    draft = Session(ScriptedEngine(next_token=repetitive(50, noise=4)))
    return create_drafter(name, draft_session=draft, head=ScriptedHead(next_token=repetitive(50, noise=4)))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_and_policy_gives_the_plain_tokens(name: str, policy: str, script: str) -> None:
    result = run(
        session(script),
        PROMPT,
        max_new_tokens=60,
        drafter=make_drafter(name),
        policy=create_policy(policy, (1, 4)),
    )
    assert result.tokens == plain(script)
    assert result.finish_reason == "length"
    assert sum(result.accepted) + result.passes == 59


@pytest.mark.parametrize("widths", [(1, 2), (1, 4), (1, 2, 4), (1, 3, 8)])
def test_good_drafts_save_passes_and_bad_ones_change_nothing(widths: tuple[int, ...]) -> None:
    truth = plain()
    for spoil in (False, True):
        result = run(
            Session(ScriptedEngine(widths=widths)),
            PROMPT,
            max_new_tokens=60,
            drafter=OracleDrafter(truth, 50, spoil=spoil),
            policy=AlwaysDraft(),
        )
        assert result.tokens == truth
        if not spoil:
            assert result.passes == -(-59 // widths[-1])
            assert result.accepted == result.drafted
    assert result.passes < 59


def test_events_carry_the_tokens_and_where_they_came_from() -> None:
    events = list(
        generate(
            session(),
            PROMPT,
            max_new_tokens=30,
            drafter=OracleDrafter(plain(), 50, spoil=False),
            policy=AlwaysDraft(),
        )
    )
    result = events.pop()
    assert isinstance(result, GenerationResult)
    assert [e.token for e in events if isinstance(e, TokenEvent)] == list(result.tokens)
    assert [e.from_draft for e in events if isinstance(e, TokenEvent)][:6] == [False, True, True, True, False, True]


@pytest.mark.parametrize("index", range(12))
def test_an_eos_ends_the_text_wherever_in_a_draft_it_stands(index: int) -> None:
    truth = plain()
    eos = {truth[index]}
    end = truth.index(truth[index])
    result = run(
        session(),
        PROMPT,
        max_new_tokens=60,
        eos=eos,
        drafter=OracleDrafter(truth, 50, spoil=False),
        policy=AlwaysDraft(),
    )
    assert (result.tokens, result.finish_reason) == (truth[: end + 1], "eos")


@pytest.mark.parametrize("slots", range(9, 22))
def test_a_full_context_ends_the_text_with_every_slot_used(slots: int) -> None:
    """The engine asserts that nothing is written past S; the last token emitted needs no slot."""
    truth = plain()
    for drafter in (None, OracleDrafter(truth, 50)):
        result = run(session(slots=slots), PROMPT, max_new_tokens=60, drafter=drafter, policy=AlwaysDraft())
        assert result.finish_reason == "context"
        assert result.tokens == truth[: slots + 1 - len(PROMPT)]


def test_a_second_request_reuses_the_shared_prefix_and_gives_the_same() -> None:
    shared = session()
    first = run(shared, PROMPT, max_new_tokens=20)
    follow_up = [*PROMPT, *first.tokens, 7, 7]
    again = run(shared, follow_up, max_new_tokens=20)
    fresh = run(session(), follow_up, max_new_tokens=20)
    assert again.reused_tokens == len(PROMPT) + 19  # the last token emitted was never fed
    assert again.tokens == fresh.tokens
    assert again.prefill_passes < fresh.prefill_passes


def test_an_abandoned_request_leaves_session_and_drafter_usable() -> None:
    used, drafter = session("repetitive"), create_drafter("learned")
    events = generate(used, PROMPT, max_new_tokens=60, drafter=drafter, policy=AlwaysDraft())
    for _ in range(17):
        next(events)
    events.close()
    assert run(used, PROMPT, max_new_tokens=60, drafter=drafter).tokens == plain("repetitive")


def test_a_prompt_can_be_given_up_between_its_passes() -> None:
    """What was run by then is reused, and the answer is that of a fresh session."""
    used = session()
    events = generate(used, [1] * 30, max_new_tokens=5)
    seen = [next(events) for _ in range(3)]
    events.close()
    assert seen == [PrefillEvent(4, 30), PrefillEvent(8, 30), PrefillEvent(12, 30)]
    again = run(used, [1] * 30, max_new_tokens=5)
    assert (again.reused_tokens, again.prefill_passes) == (12, 5)
    assert again.tokens == run(session(), [1] * 30, max_new_tokens=5).tokens


def test_every_pass_is_timed(clock: Clock) -> None:
    """By the engine alone; the drafter's time is apart, and the time of a slow reader counts nowhere."""
    engine = TimedEngine(clock, {1: 1.0, 4: 1.5})
    truth = run(Session(engine), PROMPT, max_new_tokens=30).tokens
    drafter = Fortune(clock, truth, lambda asked: asked % 2 == 0, seconds=7.0)
    events = generate(Session(engine), PROMPT, max_new_tokens=20, drafter=drafter, policy=AlwaysDraft())
    while not isinstance(event := next(events), GenerationResult):
        clock.now += 1000.0
    assert event.prefill_seconds == 3.0
    assert event.pass_seconds == tuple(1.5 if drafted else 1.0 for drafted in event.drafted)
    assert event.drafter_seconds == 7.0 * drafter.asked
    assert event.decode_seconds == event.drafter_seconds + sum(event.pass_seconds)


def test_stop_strings_cut_text_and_tokens() -> None:
    truth = plain()
    letters = Options(stop=["XY"], detokenize=lambda tokens: "".join("XY" if t == truth[9] else "ab" for t in tokens))
    end = truth.index(truth[9])
    result = run(
        session(),
        PROMPT,
        max_new_tokens=60,
        drafter=OracleDrafter(truth, 50, spoil=False),
        policy=AlwaysDraft(),
        options=letters,
    )
    assert result.finish_reason == "stop"
    assert result.tokens == truth[: end + 1]
    assert result.text == "ab" * end


def test_log_probabilities_are_the_models() -> None:
    options = Options(top_logprobs=3)
    events = generate(session(), PROMPT, max_new_tokens=3, options=options)
    event = next(event for event in events if isinstance(event, TokenEvent))
    row = session().prefill(PROMPT).row.astype(np.float64)
    expected = row - np.log(np.exp(row).sum())
    assert event.logprob == pytest.approx(expected[event.token])
    assert [t for t, _ in event.top] == np.argsort(-expected)[:3].tolist()


class ShakyEngine(ScriptedEngine):
    """Rows of wide calls are off in their last bits, enough to swap two close logits."""

    def forward(self, tokens, slots, positions):  # type: ignore[no-untyped-def]
        rows = super().forward(tokens, slots, positions)
        best = rows.argmax(axis=-1)
        for row, token in zip(rows, best, strict=True):
            row[(token + 1) % self.vocab] = row[token] - 1e-4
            if len(tokens) > 1:
                row[token] -= 2e-4
        return rows


def test_the_guard_makes_shaky_wide_rows_exact() -> None:
    """Without the guard the same engine does give other tokens, so the guard is what saves them."""

    def decode(guard: float, drafter: Drafter | None) -> GenerationResult:
        options = Options(guard_margin=guard)
        engine = Session(ShakyEngine(widths=(1, 4)))
        return run(engine, [1], max_new_tokens=40, drafter=drafter, policy=AlwaysDraft(), options=options)

    truth = decode(0.0, None).tokens
    guarded = decode(1e-3, OracleDrafter(truth, 50))
    assert guarded.tokens == truth
    assert guarded.verified_again > 0
    assert decode(0.0, OracleDrafter(truth, 50)).tokens != truth


def test_hot_or_very_short_requests_are_not_drafted() -> None:
    truth = plain()
    for count, temperature, drafts in [(9, 0.0, False), (40, 1.3, False), (40, 0.0, True)]:
        options = Options(sampling=Sampling(temperature=temperature))
        result = run(
            session(),
            PROMPT,
            max_new_tokens=count,
            drafter=OracleDrafter(truth, 50),
            policy=AlwaysDraft(),
            options=options,
        )
        assert any(result.drafted) == drafts


def test_a_prompt_may_be_an_array() -> None:
    prompt = np.array(PROMPT)
    drafter = create_drafter("learned")
    result = run(session(), prompt, max_new_tokens=20, drafter=drafter, policy=AlwaysDraft())  # type: ignore
    assert result.tokens == plain()[:20]


def test_senseless_requests_are_named() -> None:
    with pytest.raises(DecodeError, match="max_new_tokens is -1"):
        run(session(), PROMPT, max_new_tokens=-1)
    with pytest.raises(DecodeError, match="outside the vocabulary of 50"):
        run(session(), [1, 50], max_new_tokens=1)
    with pytest.raises(DecodeError, match="need a detokeniser"):
        run(session(), PROMPT, max_new_tokens=1, options=Options(stop=["x"]))
    with pytest.raises(DecodeError, match="9 tokens, the context 8"):
        generate(session(slots=8), [1] * 9, max_new_tokens=1)  # said before the first event is asked for


def test_a_private_request_is_announced_to_the_drafter() -> None:
    class Listening(OracleDrafter):
        heard: object = None

        def reset(self, prompt, info=None):  # type: ignore[no-untyped-def]
            super().reset(prompt)
            self.heard = info

        def propose(self, context, limit: int) -> Draft:  # type: ignore[no-untyped-def]
            return Draft()

    drafter = Listening((), 50)
    sampling = Sampling(temperature=0.5, seed=3)
    run(session(), PROMPT, max_new_tokens=2, drafter=drafter, options=Options(sampling=sampling, private=True))
    assert (drafter.heard.private, drafter.heard.temperature, drafter.heard.seed) == (True, 0.5, 3)  # type: ignore


@pytest.mark.parametrize(
    ("choices", "draft", "expected"),
    [
        ((4,), (), Outcome((4,), 0)),
        ((4, 5, 6, 7), (4, 5, 6), Outcome((4, 5, 6, 7), 3)),
        ((4, 5, 6, 7), (4, 5, 9), Outcome((4, 5, 6), 2)),
        ((4, 5, 6, 7), (9, 5, 6), Outcome((4,), 0)),
        ((4, 5, 6, 7), (4, 9, 6), Outcome((4, 5), 1)),  # right again after a wrong one counts nothing
        ((4, 0, 6, 7), (4, 0, 6), Outcome((4, 0), 2)),  # EOS accepted mid-draft
        ((4, 0, 6, 7), (4, 5, 6), Outcome((4, 0), 1)),  # EOS as the model's own choice
    ],
)
def test_the_longest_right_prefix_and_the_token_after_it(
    choices: tuple[int, ...], draft: tuple[int, ...], expected: Outcome
) -> None:
    assert accept(lambda i: choices[i], draft, {0}) == expected


def test_nothing_is_chosen_past_the_first_wrong_draft() -> None:
    """A chooser has state (seed, grammar): being asked for a row that is not emitted would spoil it."""
    asked: list[int] = []

    def choose(i: int) -> int:
        asked.append(i)
        return i

    accept(choose, (0, 1, 9, 3), ())
    assert asked == [0, 1, 2]


def test_another_reason_to_end_leaves_no_bonus_token() -> None:
    assert accept(lambda i: i, (0, 1, 2), (), ends=lambda: True) == Outcome((0,), 1)


@pytest.mark.parametrize(
    ("draft", "emitted", "right"), [((1, 2, 3), (1, 2), 2), ((1, 2), (1, 9, 3), 1), ((), (1,), 0), ((5,), (1,), 0)]
)
def test_agreement(draft: tuple[int, ...], emitted: tuple[int, ...], right: int) -> None:
    assert agreement(draft, emitted) == right


@pytest.mark.parametrize("widths", [(1, 4), (1, 4, 16)])
@pytest.mark.parametrize("count", [0, 3])
def test_the_prompt_s_tokens_are_scored_whatever_the_session_holds(widths: tuple[int, ...], count: int) -> None:
    """Compare with the logits before each token, in every width of pass, after texts that begin alike or otherwise."""
    text, engine = [*PROMPT * 5], ScriptedEngine()
    rows = [engine.forward([token], [i], [i])[0].astype(np.float64) for i, token in enumerate(text)]
    logs = [row - np.log(np.exp(row).sum()) for row in rows]
    here = Session(ScriptedEngine(widths=widths))
    for held in ([], text, text[:9], PROMPT):
        for _ in range(2):
            if held:
                run(here, held, max_new_tokens=1)
            *events, result = generate(here, text, max_new_tokens=count, options=Options(prompt_logprobs=2))
            found = [one for event in events if isinstance(event, PrefillEvent) for one in event.scored]
            assert [one.token for one in found] == text and found[0].logprob is None
            assert isinstance(result, GenerationResult) and result.reused_tokens == 0
            assert result.tokens == plain_after(text, count) and result.finish_reason == "length"
            exact = limits.sums("fp64", engine.vocab)  # exponentials of the vocabulary
            told = [one.logprob for one in found[1:]]
            limits.numbers_agree(
                "logprobs", told, [row[one.token] for row, one in zip(logs, found[1:], strict=False)], exact
            )
            for one, row in zip(found[1:], logs, strict=False):
                assert one.rank == 1 + int((row > row[one.token]).sum())
                assert [token for token, _ in one.top] == [*np.argsort(-row)[:2]]


def plain_after(text: list[int], count: int) -> tuple[int, ...]:
    """The likeliest tokens after a text, one at a time."""
    engine, found = ScriptedEngine(), [*text]
    for i in range(len(text) + count - 1):
        row = engine.forward([found[i]], [i], [i])
        if i + 1 >= len(found):
            found.append(int(np.argmax(row[0])))
    return tuple(found[len(text) :])
