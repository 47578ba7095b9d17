"""What the search chose, what other budgets would have bought, and which matrices cost most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from shardmill.report.drawing import HALF, SERIES, figure
from shardmill.report.plots import Plot, note
from shardmill.report.points import Point
from shardmill.report.read import Json

STEPS = 8  # rows of the front


def steps(search: Json) -> list[Json]:
    """A few points of the front, evenly spread, the smallest first."""
    front: Sequence[Json] = search["front"]
    pace = max(1, math.ceil((len(front) - 1) / STEPS))
    return [*front[:-1:pace], front[-1]]


def front_plot(search: Json, points: Sequence[Point] = ()) -> Plot:
    """The front as it is foreseen, with the choice on it, and what was measured."""
    title = "What bits buy, foreseen and measured" if points else "What bits buy, foreseen"
    words = "line: foreseen, the forms with the least loss for their bytes"
    words += f"; diamonds: measured on {points[0].tokens} tokens" if points else ""
    draw = partial(_draw_front, search=search, points=points)
    return Plot("front", title, words, False, figure("front", title, draw, HALF))


def _draw_front(axes: Axes, search: Json, points: Sequence[Point]) -> None:
    """The perplexity's growth over bits per weight."""
    chosen = search["estimate"]
    front = [(point["bits_per_weight"], point["perplexity"] - 1) for point in search["front"]]
    found = [(point.bits, point.growth) for point in points]
    axes.plot(*zip(*front, strict=True), color=SERIES[0], lw=1.8)
    if found:
        axes.plot(*zip(*found, strict=True), "D", ms=5, color=SERIES[2], ls="none")
    axes.plot([chosen["bits_per_weight"]], [chosen["perplexity"] - 1], "o", ms=7, color=SERIES[1])
    note(axes, "chosen", (chosen["bits_per_weight"], chosen["perplexity"] - 1), (8, 6), "left")
    axes.set_xlabel("bits per weight")
    grown = [growth for _, growth in (*front, *found)]
    axes.set_ylim(min(0, *grown), 1.15 * max(grown) or 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
