"""Policies by name, the plain one, the pause between tries, and requests that are not worth drafting for."""

import pytest

from shardmill.decode import DecodeError, create_policy
from shardmill.decode.drafters import Draft
from shardmill.decode.policies import AlwaysDraft, worth_drafting
from shardmill.decode.policies.base import Pause


def test_policies_by_name() -> None:
    assert [create_policy(n, (1, 4)).name for n in ("cost_model", "adaptive_k", "always")] == [
        "cost_model",
        "adaptive_k",
        "always",
    ]
    with pytest.raises(DecodeError, match="use one of cost_model"):
        create_policy("pid", (1, 4))
    with pytest.raises(DecodeError, match="acceptance floor is 40"):
        create_policy("cost_model", (1, 4), floor=40)


def test_always_means_always_up_to_a_length() -> None:
    assert AlwaysDraft(2).limit(3) == 2
    assert AlwaysDraft().limit(3) == 3
    assert AlwaysDraft().length(Draft((1, 2), (0.0, 0.0))) == 2


def test_short_outputs_and_hot_ones_are_not_worth_it() -> None:
    assert worth_drafting(10, 1.2)
    assert not worth_drafting(9, 0.0)
    assert not worth_drafting(200, 1.21)


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
