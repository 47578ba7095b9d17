"""Drawn drafts leave the model's distribution as it is, whatever decides which of them are verified.

A draft that was drawn and then not verified, because of what was drawn, would take its chance with it: the others
would come too often. So nothing that decides may look at the draw.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from drafted_decoding import POLICIES, Options, Sampling, Session, create_drafter, create_policy, run
from drafted_decoding.policies import AlwaysDraft, DraftPolicy
from numpy.typing import NDArray

from .clock import Clock, TimedEngine, clock

__all__ = ["clock"]
P = np.array([0.6, 0.05, 0.05, 0.2, 0.1])
Q = np.array([0.4, 0.3, 0.2, 0.05, 0.05])  # the draft model's
ALLOWED = np.array([True, False, True, True, False])
COSTS = {1: 1.0, 4: 1.5}
TEXTS, LENGTH = 150, 24
CRITICAL = {4: 18.47, 2: 13.82}  # chi-squared, p = 0.001, by degrees of freedom


class FlatEngine(TimedEngine):
    """Every token has the same distribution, whatever stands before it."""

    def __init__(self, clock: Clock, costs: Mapping[int, float], probs: NDArray[np.float64]) -> None:
        super().__init__(clock, costs)
        self.vocab, self._logits = len(probs), np.log(probs).astype(np.float32)

    def _row(self, position: int) -> NDArray[np.float32]:
        return self._logits


class Subset:
    """A grammar of one rule: no token but those allowed."""

    finished = False

    def allowed(self) -> NDArray[np.bool_]:
        return ALLOWED

    def advance(self, token: int) -> None:
        assert ALLOWED[token]

    def valid_prefix(self, draft: Sequence[int]) -> int:
        return next((i for i, token in enumerate(draft) if not ALLOWED[token]), len(draft))

    def forced(self) -> Sequence[int]:
        return ()


def sampled(clock: Clock, policy: Callable[[], DraftPolicy], constraint: Subset | None) -> tuple[list[int], int]:
    """Tokens that decoding with a draft model chose, and how many drafts were verified."""
    target = Session(FlatEngine(clock, COSTS, P))
    drafter = create_drafter("draft_model", draft_session=Session(FlatEngine(clock, {1: 0.0, 4: 0.0}, Q)))
    chosen = policy()
    tokens: list[int] = []
    verified = 0
    for seed in range(TEXTS):
        options = Options(sampling=Sampling(temperature=1.0, seed=seed), constraint=constraint)
        result = run(target, [0], max_new_tokens=LENGTH, drafter=drafter, policy=chosen, options=options)
        tokens += result.tokens[1:]  # the first comes with the prefill
        verified += sum(result.drafted)
    return tokens, verified


@pytest.mark.thorough(but=["always-constraint1"])
@pytest.mark.parametrize("constraint", [None, Subset()])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_draft_model_keeps_the_distribution(clock: Clock, policy: str, constraint: Subset | None) -> None:
    tokens, verified = sampled(clock, lambda: create_policy(policy, sorted(COSTS), costs=COSTS), constraint)
    wanted = P * (ALLOWED if constraint else 1)
    expected = len(tokens) * wanted / wanted.sum()
    observed = np.bincount(tokens, minlength=len(P))
    possible = expected > 0
    chi_squared = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
    assert verified > 0
    assert not observed[~possible].any()
    assert chi_squared < CRITICAL[int(possible.sum()) - 1]


def test_a_policy_that_looks_at_the_draw_is_found_out(clock: Clock) -> None:
    """The test above can fail."""

    class Peeking(AlwaysDraft):
        def length(self, draft):  # type: ignore[no-untyped-def]
            return int(draft.tokens[:1] == (0,))

    tokens, _ = sampled(clock, Peeking, None)
    assert np.bincount(tokens).argmax() == 0
    assert np.mean(np.array(tokens) == 0) > P[0] + 0.05
