"""Draft policies by name."""

from collections.abc import Mapping, Sequence

from shardmill.decode.errors import DecodeError
from shardmill.decode.policies.always import AlwaysDraft
from shardmill.decode.policies.base import DraftPolicy, PassReport, worth_drafting
from shardmill.decode.policies.cost_model import CostModel, measure_widths

__all__ = [
    "POLICIES",
    "AlwaysDraft",
    "CostModel",
    "DraftPolicy",
    "PassReport",
    "create_policy",
    "measure_widths",
    "worth_drafting",
]

POLICIES = ("cost_model", "always")


def create_policy(name: str, widths: Sequence[int], *, costs: Mapping[int, float] | None = None) -> DraftPolicy:
    """Create a policy; it may serve many requests of one engine and learns from them.

    Args:
        name: one of `POLICIES`.
        widths: the widths of decode passes.
        costs: seconds by width (`cost_model.measure_widths`).

    Raises:
        DecodeError: no policy has that name.
    """
    if name == "cost_model":
        return CostModel(widths, costs=costs)
    if name == "always":
        return AlwaysDraft()
    raise DecodeError(f"no draft policy is called {name!r}: use one of {', '.join(POLICIES)}")
