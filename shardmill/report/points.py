"""Measured sets of forms: the predicted and the measured cost of each, and whether both give the same ranking."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from shardmill.report.read import Json
from shardmill.report.speed import Plot, drawn, note
from shardmill.report.wording import SERIES

ALIKE = 0.9  # at this rank correlation or above, estimates are good enough for a choice
CALLED = {"chosen": "the choice", "int8": "INT8", "int4": "INT4, what follows the layers in INT8"}
OFF_THE_FRONT = ("int4", "int8")  # measured for comparison


@dataclass(frozen=True)
class Point:
    """One set of forms: its bits, bytes and predicted cost, and its measured cost; divergences are in nats."""

    name: str  # the name of its file
    foreseen: Json  # its `kl` is the sum of the costs of single matrices
    measured: Json  # its `error` is the standard error of the perplexity's growth

    @property
    def called(self) -> str:
        """Return a readable name."""
        return CALLED.get(self.name) or f"front, point {self.name.removeprefix('front_')}"


def measured_points(contents: Mapping[str, Json]) -> list[Point]:
    """Return the measured points in order of their bytes, the fewest first."""
    made = [Point(name, content["foreseen"], content["measured"]) for name, content in contents.items()]
    return sorted(made, key=lambda point: (point.foreseen["bytes"], point.name))


def judged(points: Sequence[Point]) -> list[str]:
    """Return sentences for a reader that say whether the estimates hold."""
    pairs = list(dict.fromkeys((point.foreseen["kl"], point.measured["kl"]) for point in points))
    correlation = _spearman(pairs)
    if correlation is None:
        return ["Too few different points were measured to say whether estimates rank as they do."]
    text = f"Over {len(pairs)} different points, foreseen and measured divergence have a rank correlation of "
    sentences = [f"{text}{correlation:.3f} (Spearman)."]
    if correlation < ALIKE:
        unsure = "on this model the sum of single costs foretells little; choose by the measured points"
        sentences.append(f"That is under {ALIKE}: {unsure}.")
    front = [point for point in points if point.name not in OFF_THE_FRONT]
    crossed = [
        f"The measured front is not monotone: {b.called} reads more than {a.called} and diverges more "
        f"({b.measured['kl']:.4f} and {a.measured['kl']:.4f} nat)."
        for a, b in pairwise(front)
        if a.foreseen["bytes"] < b.foreseen["bytes"] and a.measured["kl"] < b.measured["kl"]
    ]
    return sentences + (crossed or ["The measured front is monotone: whatever reads more diverges less."])


def _spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the rank correlation; None for fewer than three pairs, or if one variable is constant."""
    from scipy.stats import spearmanr

    if len(pairs) < 3 or any(len({*values}) == 1 for values in zip(*pairs, strict=True)):
        return None
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


STEPS = 8  # rows of the front


def front_steps(search: Json) -> list[Json]:
    """Return a few points of the front, evenly spread, the smallest first."""
    front: Sequence[Json] = search["front"]
    pace = max(1, math.ceil((len(front) - 1) / STEPS))
    return [*front[:-1:pace], front[-1]]


def front_plot(search: Json, points: Sequence[Point] = ()) -> Plot:
    """Return a figure of the predicted front, with the choice on it and the measured points."""
    title = "What bits buy, foreseen and measured" if points else "What bits buy, foreseen"
    words = "line: foreseen, the forms with the least loss for their bytes"
    words += f"; diamonds: measured on {points[0].measured['tokens']} tokens" if points else ""
    return drawn("front", title, words, partial(_draw_front, search=search, points=points))


def _draw_front(axes: Axes, search: Json, points: Sequence[Point]) -> None:
    """Draw the perplexity's growth over bits per weight."""
    chosen = search["estimate"]
    front = [(point["bits_per_weight"], point["perplexity"] - 1) for point in search["front"]]
    measured = [(point.foreseen["bits_per_weight"], point.measured["perplexity"] - 1) for point in points]
    axes.plot(*zip(*front, strict=True), color=SERIES[0], lw=1.8)
    if measured:
        axes.plot(*zip(*measured, strict=True), "D", ms=5, color=SERIES[2], ls="none")
    axes.plot([chosen["bits_per_weight"]], [chosen["perplexity"] - 1], "o", ms=7, color=SERIES[1])
    note(axes, "chosen", (chosen["bits_per_weight"], chosen["perplexity"] - 1), (8, 6), "left")
    axes.set_xlabel("bits per weight")
    grown = [growth for _, growth in (*front, *measured)]
    axes.set_ylim(min(0, *grown), 1.15 * max(grown) or 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
