"""Policies by name; the default one drafts where it pays, loses little where it does not, whatever moments are slow."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from drafted_decoding import (
    POLICIES,
    DecodeError,
    GenerationResult,
    Session,
    create_drafter,
    create_policy,
    measure_widths,
    run,
)
from drafted_decoding.drafters import Draft, Drafter
from drafted_decoding.policies import (
    AlwaysDraft,
    CostModel,
    DraftPolicy,
    PassReport,
    worth_drafting,
)

from .clock import Clock, Fortune, TimedEngine, clock
from .scripted import ScriptedEngine, chaotic, repetitive

__all__ = ["clock"]
SURE = Draft((1, 2, 3), (0.9, 0.9, 0.9))
VAGUE = Draft((1, 2, 3), (0.1, 0.1, 0.1))
PROMPT = [3, 1, 4, 1, 5]
DEMO = {1: 6.5, 4: 8.6}  # milliseconds, of the demo on the portable engine
ANE = {1: 53.0, 4: 57.0}  # as published for Phi-4-mini
DEAR = {1: 10.0, 4: 25.0}
NEVER: Callable[[int], bool] = lambda asked: False  # noqa: E731
ALWAYS: Callable[[int], bool] = lambda asked: True  # noqa: E731


def report(draft: Draft, drafted: int, right: int, seconds: float = 1.0) -> PassReport:
    return PassReport(
        width=4 if drafted else 1,
        drafted=drafted,
        accepted=min(drafted, right),
        confidence=draft.confidence,
        right=right,
        seconds=seconds,
        drafter_seconds=0.0,
    )


def started(widths: Sequence[int], **settings: Any) -> CostModel:
    """A policy at the beginning of a long request."""
    policy = CostModel(widths, **settings)
    policy.start(200)
    return policy


def truth(length: int = 200) -> tuple[int, ...]:
    """What the scripted engine says, and a little more."""
    return run(Session(ScriptedEngine(slots=512)), PROMPT, max_new_tokens=length + 4).tokens


def decode(engine: ScriptedEngine, drafter: Drafter, policy: DraftPolicy | None, length: int = 200) -> GenerationResult:
    return run(Session(engine), PROMPT, max_new_tokens=length, drafter=drafter, policy=policy)


def test_it_drafts_only_what_pays() -> None:
    policy = started((1, 4), costs={1: 1.0, 4: 1.5})
    assert policy.length(SURE) == 3
    assert policy.length(VAGUE) == 0
    assert policy.length(Draft()) == 0
    assert started((1, 4), costs={1: 1.0, 4: 3.9}).length(SURE) == 0
    assert started((1, 4), costs={1: 1.0, 4: 1.05}).length(VAGUE) == 3


def test_it_picks_among_widths() -> None:
    """A third draft that would need the dear width is left out."""
    policy = started((1, 2, 4), costs={1: 1.0, 2: 1.1, 4: 3.0})
    assert policy.length(SURE) == 1


def test_boasting_confidence_is_corrected_without_drafting() -> None:
    """Proposals that were not verified are judged by the emitted token, so no estimate gets stuck."""
    policy = started((1, 4), costs={1: 1.0, 4: 1.5})
    for _ in range(60):
        policy.observe(report(Draft((1,), (0.9,)), 0, 0))
    assert policy.length(SURE) == 0
    for _ in range(200):
        policy.observe(report(Draft((1,), (0.9,)), 0, 1))
    assert policy.length(SURE) == 3


def test_few_accepted_drafts_are_fine_while_they_pay() -> None:
    """The floor alone stops nothing: one of three accepted at hardly any cost is a gain."""
    policy = started((1, 4), costs={1: 1.0, 4: 1.1})
    for _ in range(40):
        assert policy.limit(3) == 3
        policy.observe(report(VAGUE, 3, 1, 1.1))


@pytest.mark.parametrize("costs", [DEMO, ANE, DEAR])
def test_a_drafter_that_is_never_right_costs_a_few_percent_at_most(clock: Clock, costs: dict[int, float]) -> None:
    """However sure it is of itself, and in every request anew."""
    policy = CostModel((1, 4), costs=costs)
    for length in (40, 80, 200, 200):
        engine = TimedEngine(clock, costs)
        drafter = Fortune(clock, truth(), NEVER)
        assert decode(engine, drafter, policy, length).decode_seconds <= (length - 1) * costs[1] / 0.97
        assert drafter.asked > 0.9 * length  # proposals are judged without being verified


def test_drafts_that_turn_good_are_found_out(clock: Clock) -> None:
    """From the 12th proposal on all are right: most of the rest of the text goes by the wide pass."""
    result = decode(TimedEngine(clock, DEMO), Fortune(clock, truth(400), lambda n: n >= 12), CostModel((1, 4)), 400)
    assert sum(result.accepted[-40:]) > 100


@pytest.mark.parametrize("costs", [DEMO, ANE, DEAR])
@pytest.mark.parametrize("measured", [True, False])
def test_good_drafts_are_taken_nearly_always(clock: Clock, costs: dict[int, float], measured: bool) -> None:
    policy = CostModel((1, 4), costs=costs if measured else None)
    best = decode(TimedEngine(clock, costs), Fortune(clock, truth(), ALWAYS), AlwaysDraft())
    chosen = decode(TimedEngine(clock, costs), Fortune(clock, truth(), ALWAYS), policy)
    assert chosen.decode_seconds <= best.decode_seconds * (1.0001 if measured else 1.1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ngram", "suffix", "learned"])
@pytest.mark.parametrize("costs", [DEMO, ANE, DEAR])
@pytest.mark.parametrize("noise", [2, 4, 9, 30])
def test_it_is_never_far_from_the_best_of_drafting_and_not(
    clock: Clock, name: str, costs: dict[int, float], noise: int
) -> None:
    """On texts from hardly predictable to nearly periodic; the engine's time alone, as the clock stands still else."""
    plain, always, chosen = (
        decode(TimedEngine(clock, costs, repetitive(50, noise=noise)), create_drafter(drafter), policy).decode_seconds
        for drafter, policy in (("none", None), (name, AlwaysDraft()), (name, CostModel((1, 4), costs=costs)))
    )
    assert chosen <= plain / 0.97
    assert chosen <= always / 0.93


def test_a_drafter_slower_than_the_model_is_given_up(clock: Clock) -> None:
    """Always right, and still a loss, as a proposal takes five passes' time."""
    policy = CostModel((1, 4), costs=DEMO)
    drafter = Fortune(clock, truth(), ALWAYS, seconds=5 * DEMO[1])
    decode(TimedEngine(clock, DEMO), drafter, policy)
    second = decode(TimedEngine(clock, DEMO), drafter, policy)
    assert second.decode_seconds <= 199 * DEMO[1] / 0.95
    assert drafter.asked < 20


def test_work_that_a_drafter_does_once_a_request_is_not_held_against_it(clock: Clock) -> None:
    """A draft model runs the prompt before its first proposal."""
    drafter = Fortune(clock, truth(), ALWAYS, first_seconds=30 * DEMO[1])
    result = decode(TimedEngine(clock, DEMO), drafter, CostModel((1, 4), costs=DEMO))
    assert result.tokens_per_pass > 3.5


def test_the_time_of_running_rows_again_counts() -> None:
    """Where the guard doubles the cost of a wide pass, drafts must promise more."""
    policy = started((1, 4), costs={1: 1.0, 4: 1.3})
    fair = Draft((1, 2, 3), (0.5, 0.5, 0.5))
    assert policy.length(fair) == 3
    for _ in range(40):
        policy.observe(PassReport(4, 3, 1, (0.5, 0.5), 1, 1.3, 0.0, guard_seconds=2.0))
    assert policy.length(fair) == 0


def test_a_slow_first_call_of_a_width_is_no_reason_to_avoid_it(clock: Clock) -> None:
    """Nothing was measured, and each width's first call, which may compile a program, takes as long as 500 others."""
    seen: set[int] = set()

    def slower(call: int, width: int) -> float:
        first = width not in seen
        seen.add(width)
        return 500.0 if first else 1.0

    engine = TimedEngine(clock, DEMO, slower=slower)
    result = run(Session(engine), [3], max_new_tokens=200, drafter=create_drafter("none"))
    drafter = Fortune(clock, result.tokens, ALWAYS)
    seen.clear()
    result = run(Session(engine), [3], max_new_tokens=196, drafter=drafter)
    assert result.tokens_per_pass > 3


def test_a_slow_spell_on_one_width_is_outlived(clock: Clock) -> None:
    """For 12 calls the wide pass takes 20 times as long; later it is tried anew, and drafting goes on."""
    engine = TimedEngine(clock, DEMO, slower=lambda call, width: 20.0 if width == 4 and 10 <= call < 22 else 1.0)
    drafter = Fortune(clock, truth(400), lambda n: n % 5 != 0)
    result = decode(engine, drafter, CostModel((1, 4), costs=DEMO), 400)
    assert sum(result.accepted[-30:]) > 60


def test_a_machine_that_slows_down_as_a_whole_changes_nothing(clock: Clock) -> None:
    """Half way, every pass takes three times as long, whatever its width."""
    drafter = Fortune(clock, truth(), lambda n: n % 4 != 0)
    steady = decode(TimedEngine(clock, DEMO), drafter, CostModel((1, 4), costs=DEMO))
    drafter = Fortune(clock, truth(), lambda n: n % 4 != 0)
    slowed = decode(
        TimedEngine(clock, DEMO, slower=lambda call, width: 3.0 if call > 30 else 1.0),
        drafter,
        CostModel((1, 4), costs=DEMO),
    )
    assert slowed.drafted == steady.drafted


def test_the_floor_decides_how_soon_a_loss_ends_drafting() -> None:
    """One of three drafts is accepted, at a loss: with a floor above that drafting rests earlier."""
    tries = []
    for floor in (0.0, 0.4):
        policy = started((1, 4), costs={1: 1.0, 4: 2.5}, floor=floor)
        tries.append(0)
        while policy.length(SURE):
            policy.observe(report(VAGUE, 3, 1, 2.5))
            tries[-1] += 1
    assert tries[0] > tries[1] > 0


def test_the_next_request_is_given_a_chance() -> None:
    policy = started((1, 4), costs={1: 1.0, 4: 2.0})
    while policy.length(SURE):
        policy.observe(report(VAGUE, 3, 0, 2.0))
    policy.start(200)
    assert policy.length(SURE) == 3
    policy.start(20)
    assert policy.length(SURE) == 0  # its output is too short to earn a failure back


def test_measuring_tries_every_width_and_leaves_the_engine_empty() -> None:
    engine = ScriptedEngine(widths=(1, 2, 4))
    costs = measure_widths(engine, repeats=2)
    assert sorted(costs) == [1, 2, 4]
    assert all(seconds > 0 for seconds in costs.values())
    assert [len(call) for call in engine.calls] == [1, 2, 4, 1, 2, 4, 1, 2, 4]
    assert min(engine._position) > 1000


def test_chaos_is_never_drafted_for_long(clock: Clock) -> None:
    """On text without any repetition the suffix drafter, which always says something, is soon left alone."""
    engine = TimedEngine(clock, DEMO, chaotic(50))
    result = decode(engine, create_drafter("suffix"), CostModel((1, 4), costs=DEMO))
    assert sum(d > 0 for d in result.drafted) <= 12


def test_policies_by_name() -> None:
    assert [create_policy(name, (1, 4)).name for name in POLICIES] == list(POLICIES)
    with pytest.raises(DecodeError, match="use one of cost_model"):
        create_policy("pid", (1, 4))


def test_always_means_always() -> None:
    assert AlwaysDraft().limit(3) == 3
    assert AlwaysDraft().length(Draft((1, 2), (0.0, 0.0))) == 2


def test_short_outputs_and_hot_ones_are_not_worth_it() -> None:
    assert worth_drafting(10, 1.2)
    assert not worth_drafting(9, 0.0)
    assert not worth_drafting(200, 1.21)
