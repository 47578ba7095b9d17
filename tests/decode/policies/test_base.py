"""Policies by name, the plain one, and requests that are not worth drafting for."""

import pytest

from shardmill.decode import POLICIES, DecodeError, create_policy
from shardmill.decode.drafters import Draft
from shardmill.decode.policies import AlwaysDraft, worth_drafting


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
