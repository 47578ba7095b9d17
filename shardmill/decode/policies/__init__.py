"""Draft policies by name."""

from collections.abc import Mapping, Sequence

from shardmill.decode.errors import DecodeError
from shardmill.decode.policies.adaptive_k import AdaptiveK
from shardmill.decode.policies.always import AlwaysDraft
from shardmill.decode.policies.base import FLOOR, DraftPolicy, PassReport, worth_drafting
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

POLICIES = ("cost_model", "adaptive_k", "always")


def create_policy(
    name: str, widths: Sequence[int], *, costs: Mapping[int, float] | None = None, floor: float = FLOOR
) -> DraftPolicy:
    """A fresh policy; one may serve many requests of one engine and learns from them.

    Args:
        widths: the engine's.
        costs: seconds by width (`cost_model.measure_widths`).
        floor: acceptance rate under which drafting may pause.

    Raises:
        DecodeError: no policy has that name, or `floor` is no rate.
    """
    if not 0 <= floor <= 1:
        raise DecodeError(f"the acceptance floor is {floor}: it must be in [0, 1]")
    if name == "cost_model":
        return CostModel(widths, costs=costs, floor=floor)
    if name == "adaptive_k":
        return AdaptiveK(floor=floor)
    if name == "always":
        return AlwaysDraft()
    raise DecodeError(f"no draft policy is called {name!r}: use one of {', '.join(POLICIES)}")
