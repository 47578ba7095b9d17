"""Policies draft where it pays, rest where it does not, and try again later."""

import pytest

from shardmill.decode import DecodeError, Session, create_policy, measure_widths, run
from shardmill.decode.adaptive_k import AdaptiveK
from shardmill.decode.calibrate import Calibration
from shardmill.decode.cost_model import CostModel
from shardmill.decode.drafters import Draft
from shardmill.decode.policy import AlwaysDraft, DraftPolicy, PassReport, Pause

from .scripted import OracleDrafter, ScriptedEngine

SURE = Draft((1, 2, 3), (0.9, 0.9, 0.9))
VAGUE = Draft((1, 2, 3), (0.1, 0.1, 0.1))


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


def test_the_cost_model_drafts_only_what_pays() -> None:
    policy = CostModel((1, 4), costs={1: 1.0, 4: 1.5})
    assert policy.length(SURE) == 3
    assert policy.length(VAGUE) == 0
    assert policy.length(Draft()) == 0
    assert CostModel((1, 4), costs={1: 1.0, 4: 3.9}).length(SURE) == 0
    assert CostModel((1, 4), costs={1: 1.0, 4: 1.05}).length(VAGUE) == 3


def test_the_cost_model_picks_among_widths() -> None:
    """A third draft that would need the dear width is left out."""
    policy = CostModel((1, 2, 4), costs={1: 1.0, 2: 1.1, 4: 3.0})
    assert policy.length(SURE) == 1


def test_measured_costs_replace_the_first_ones() -> None:
    policy = CostModel((1, 4), costs={1: 1.0, 4: 1.2})
    for _ in range(40):
        policy.observe(report(SURE, 3, 3, seconds=4.0))
    assert policy.length(SURE) == 0


def test_boasting_confidence_is_corrected_without_drafting() -> None:
    """Proposals that were not verified are judged by the emitted token, so no estimate gets stuck."""
    policy = CostModel((1, 4), costs={1: 1.0, 4: 1.5})
    for _ in range(60):
        policy.observe(report(Draft((1,), (0.9,)), 0, 0))
    assert policy.length(SURE) == 0
    for _ in range(200):
        policy.observe(report(Draft((1,), (0.9,)), 0, 1))
    assert policy.length(SURE) == 3


@pytest.mark.parametrize("policy", [CostModel((1, 4), costs={1: 1.0, 4: 2.0}), AdaptiveK()])
def test_losing_drafts_lead_to_a_pause_and_a_probe(policy: DraftPolicy) -> None:
    limits = []
    for _ in range(120):
        limits.append(policy.limit(3))
        policy.observe(report(VAGUE, 3, 0, 2.0) if limits[-1] else report(Draft(), 0, 0))
    pauses = [len(run) for run in "".join("x" if n == 0 else "." for n in limits).split(".") if run]
    assert pauses[:3] == [8, 16, 32]  # each vain try is followed by a longer rest
    assert limits[:4] == [3, 3, 3, 3]


def test_few_accepted_drafts_are_fine_while_they_pay() -> None:
    """The floor alone stops nothing: one of three accepted at hardly any cost is a gain."""
    policy = CostModel((1, 4), costs={1: 1.0, 4: 1.1})
    for _ in range(40):
        assert policy.limit(3) == 3
        policy.observe(report(VAGUE, 3, 1, 1.1))


def test_adaptive_k_follows_the_acceptance_rate() -> None:
    policy = AdaptiveK(window=4)
    assert policy.limit(10) == 6
    for right, expected in [(6, 8), (3, 6), (0, 3)]:
        for _ in range(4):
            policy.observe(report(Draft(), 6, right))
        policy._pause = Pause()
        assert policy.limit(10) == expected
    assert policy.limit(2) == 2


def test_a_success_shortens_the_next_pause() -> None:
    pause = Pause(first=2, longest=8, probe=1)
    lengths = []
    for right in (0, 0, 3, 0):
        pause.judge(3, right, right - 1.0, 0.4)
        lengths.append(0)
        while pause.active:
            pause.tick()
            lengths[-1] += 1
    assert lengths == [2, 4, 0, 2]


def test_calibration_starts_as_stated_and_ends_as_observed() -> None:
    calibration = Calibration()
    assert [calibration.rate(c) for c in (0.0, 0.3, 0.8, 1.0)] == pytest.approx([0, 0.3, 0.8, 1], abs=1 / 12)
    assert calibration.expected([1.0, 1.0]) == [1, 2]
    half = calibration.rate(0.5)
    assert calibration.expected([0.5, 0.5]) == pytest.approx([half, half + half**2])
    for _ in range(300):
        calibration.observe([0.8, 0.8], 0)
    assert calibration.rate(0.8) < 0.02
    for _ in range(3000):
        calibration.observe([0.8], 1)
    assert calibration.rate(0.8) > 0.9  # old trials fade


def test_tokens_behind_a_wrong_one_prove_nothing() -> None:
    calibration = Calibration()
    before = calibration.rate(0.2)
    calibration.observe([0.8, 0.2], 0)
    assert calibration.rate(0.2) == before
    calibration.observe([0.8, 0.2], 1)
    assert calibration.rate(0.2) < before


def test_measuring_tries_every_width_and_leaves_the_engine_empty() -> None:
    engine = ScriptedEngine(widths=(1, 2, 4))
    costs = measure_widths(engine, repeats=2)
    assert sorted(costs) == [1, 2, 4]
    assert all(seconds > 0 for seconds in costs.values())
    assert [len(call) for call in engine.calls] == [1, 2, 4, 1, 2, 4, 1, 2, 4]
    assert min(engine._position) > 1000


def test_always_wrong_drafts_soon_cost_nothing() -> None:
    """With honest costs the default policy gives up on a drafter that is never right."""
    truth = run(Session(ScriptedEngine()), [1], max_new_tokens=150).tokens
    wrong = OracleDrafter([(t + 1) % 50 for t in truth], 50, spoil=False)
    policy = CostModel((1, 4), costs={1: 1.0, 4: 1.3})
    policy._seconds = {w: _Fixed([c]) for w, c in {1: 1.0, 4: 1.3}.items()}  # type: ignore[misc]
    result = run(Session(ScriptedEngine()), [1], max_new_tokens=150, drafter=wrong, policy=policy)
    assert result.tokens == truth
    assert sum(d > 0 for d in result.drafted) <= 10


class _Fixed(list[float]):
    """Costs that measuring does not change."""

    def append(self, seconds: float) -> None:
        pass


def test_policies_by_name() -> None:
    assert [create_policy(n, (1, 4)).name for n in ("cost_model", "adaptive_k", "always")] == [
        "cost_model",
        "adaptive_k",
        "always",
    ]
    assert AlwaysDraft(2).limit(3) == 2
    with pytest.raises(DecodeError, match="use one of cost_model"):
        create_policy("pid", (1, 4))
    with pytest.raises(DecodeError, match="acceptance floor is 40"):
        create_policy("cost_model", (1, 4), floor=40)
