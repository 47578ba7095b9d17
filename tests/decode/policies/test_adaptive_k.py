"""The scheme that knows no costs: longer drafts after many acceptances, none at a loss, and a try later."""

from shardmill.decode.policies.adaptive_k import AdaptiveK
from shardmill.decode.policies.base import PassReport, Pause


def report(drafted: int, right: int) -> PassReport:
    return PassReport(4 if drafted else 1, drafted, min(drafted, right), (0.5,) * drafted, right, 1.0, 0.0)


def test_it_follows_the_acceptance_rate() -> None:
    policy = AdaptiveK(window=4)
    assert policy.limit(10) == 6
    for right, expected in [(6, 8), (3, 6), (0, 3)]:
        for _ in range(4):
            policy.observe(report(6, right))
        policy._pause = Pause()
        assert policy.limit(10) == expected
    assert policy.limit(2) == 2


def test_losing_drafts_lead_to_a_pause_and_a_probe() -> None:
    policy, limits = AdaptiveK(), []
    for _ in range(120):
        limits.append(policy.limit(3))
        policy.observe(report(3, 0) if limits[-1] else report(0, 0))
    pauses = [len(run) for run in "".join("x" if n == 0 else "." for n in limits).split(".") if run]
    assert pauses[:3] == [8, 16, 32]  # each vain try is followed by a longer rest
    assert limits[:4] == [3, 3, 3, 3]
