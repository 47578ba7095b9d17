"""Which matrices cost most of what a search foresees, and what more bits of them would change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WORST = 12  # matrices that are listed


@dataclass(frozen=True)
class Costly:
    """A matrix as it was chosen to be stored, and what the next form with more bits and less loss would change."""

    path: str
    form: str
    nats: float
    share: float  # of what all matrices cost
    saves: float  # nats, in that form; 0 where there is none
    takes: int  # bytes more


def costliest(search: Mapping[str, Any]) -> list[Costly]:
    """The matrices that cost most, in falling order."""
    forms, costs, sizes = search["forms"], search["costs"], search["sizes"]
    total = sum(costs[path][form] for path, form in forms.items()) or 1.0
    found = []
    for path, form in forms.items():
        own, size = costs[path][form], sizes[path][form]
        larger = [(other_size, costs[path][other]) for other, other_size in sizes[path].items() if other_size > size]
        most, nats = min(((size, nats) for size, nats in larger if nats < own), default=(size, own))
        found.append(Costly(path, form, own, own / total, own - nats, int(most - size)))
    return sorted(found, key=lambda one: (-one.nats, one.path))[:WORST]
