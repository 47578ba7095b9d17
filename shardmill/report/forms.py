"""What the search chose, what other budgets would have bought, and which matrices cost most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from shardmill.report.drawing import HALF, SERIES, figure
from shardmill.report.plots import Plot, note
from shardmill.report.read import Json

WORST = 12  # matrices that are listed
STEPS = 8  # rows of the front


@dataclass(frozen=True)
class Costly:
    """A matrix as it was chosen to be stored, and what the other form would change."""

    path: str
    form: str
    nats: float
    share: float  # of what all matrices cost
    saves: float  # nats, in the form of more bits; 0 where there is none
    takes: int  # bytes more


def costliest(search: Json) -> list[Costly]:
    """The matrices that cost most, in falling order."""
    forms, costs, sizes = search["forms"], search["costs"], search["sizes"]
    total = sum(costs[path][form] for path, form in forms.items()) or 1.0
    found = []
    for path, form in forms.items():
        own, size = costs[path][form], sizes[path][form]
        larger = [(costs[path][other], other_size) for other, other_size in sizes[path].items() if other_size > size]
        nats, most = min(larger, default=(own, size))
        found.append(Costly(path, form, own, own / total, own - nats, int(most - size)))
    return sorted(found, key=lambda one: (-one.nats, one.path))[:WORST]


def steps(search: Json) -> list[Json]:
    """A few points of the front, evenly spread, the smallest first."""
    front: Sequence[Json] = search["front"]
    pace = max(1, math.ceil((len(front) - 1) / STEPS))
    return [*front[:-1:pace], front[-1]]


def front_plot(search: Json) -> Plot:
    """The front as it is foreseen, with the choice on it."""
    title = "What bits buy, foreseen"
    words = "each point: the forms with the least loss for their bytes"
    draw = partial(_draw_front, search=search)
    return Plot("front", title, words, False, figure("front", title, draw, HALF))


def _draw_front(axes: Axes, search: Json) -> None:
    """The perplexity's growth over bits per weight."""
    chosen = search["estimate"]
    points = [(point["bits_per_weight"], point["perplexity"] - 1) for point in search["front"]]
    axes.plot(*zip(*points, strict=True), color=SERIES[0], lw=1.8)
    axes.plot([chosen["bits_per_weight"]], [chosen["perplexity"] - 1], "o", ms=7, color=SERIES[1])
    note(axes, "chosen", (chosen["bits_per_weight"], chosen["perplexity"] - 1), (8, 6), "left")
    axes.set_xlabel("bits per weight")
    axes.set_ylim(0, 1.15 * max(growth for _, growth in points) or 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
