"""How far a budget of bits or bytes can be kept to, told by the shapes of matrices alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10, prod

from shardmill.forms.form import FP16, Shape, matrices, misfit, stored_bytes


def amount(budget: str, value: float) -> str:
    """A budget's value as a person writes it."""
    return f"{value:.0f}" if budget == "bytes_per_token" else f"{value:.8g}"


def at_least(budget: str, value: float) -> str:
    """The same of the least that can be kept to: rounded up, so that a budget of it is no less."""
    if budget == "bytes_per_token":
        return f"{ceil(value)}"
    text = amount(budget, value)
    return text if float(text) >= value else amount(budget, value + 10.0 ** (floor(log10(value)) - 7))


def unreachable(budget: Mapping[str, float | None], forms: Sequence[str], constants: Mapping[str, Shape]) -> list[str]:
    """How a budget of bits or bytes is less than a search could reach with the smallest form of each matrix.

    Args:
        budget: the config's, by name.
        forms: that the search may take.
        constants: of all programs, of the LM head those of the whole.
    """
    least = {
        path: min((stored_bytes(name, shape) for name in forms if not misfit(name, shape)), default=0)
        for path, shape in matrices(constants).items()
    }
    numbers = sum(map(prod, matrices(constants).values()))
    others = sum(stored_bytes(FP16, shape) for path, shape in constants.items() if path not in least)
    reached = {"bits_per_weight": 8 * sum(least.values()) / numbers, "bytes_per_token": sum(least.values()) + others}
    return [
        f"convert.budget.{name}: {amount(name, limit)} is less than any forms reach: "
        f"with {', '.join(forms)} it is {at_least(name, reached[name])} at least"
        for name, limit in budget.items()
        if name in reached and limit is not None and limit < reached[name]
    ]
