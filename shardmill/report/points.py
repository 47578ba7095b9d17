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
from shardmill.report.speed import Plot, note
from shardmill.report.wording import HALF, SERIES, figure

ALIKE = 0.9  # at this rank correlation or above, estimates are good enough for a choice
CALLED = {"chosen": "the choice", "int8": "INT8", "int4": "INT4, what follows the layers in INT8"}
OFF_THE_FRONT = ("int4", "int8")  # measured for comparison


@dataclass(frozen=True)
class Point:
    """One set of forms.

    Attributes:
        name: the name of its file.
        bits: bits per weight.
        bytes: bytes that a pass reads.
        foreseen_kl: predicted divergence in nats, the sum of the costs of single matrices.
        foreseen: the growth of the perplexity that follows from `foreseen_kl`.
        kl: measured divergence in nats.
        growth: measured growth of the perplexity.
        error: the standard error of `growth`.
        top1: share of the decided positions with the same most likely token.
        tokens: the number of tokens in the measurement.
    """

    name: str
    bits: float
    bytes: int
    foreseen_kl: float
    foreseen: float
    kl: float
    growth: float
    error: float
    top1: float
    tokens: int

    @property
    def called(self) -> str:
        """Return a readable name."""
        return CALLED.get(self.name) or f"front, point {self.name.removeprefix('front_')}"


@dataclass(frozen=True)
class Judgement:
    """A judgement whether the estimates hold.

    Attributes:
        correlation: Spearman's correlation of predicted and measured divergence; None for too few points.
        sentences: the judgement in sentences for a reader.
    """

    correlation: float | None
    sentences: tuple[str, ...]


def measured_points(found: Mapping[str, Json]) -> list[Point]:
    """Return the measured points in order of their bytes, the fewest first."""
    made = [_point(name, content["foreseen"], content["measured"]) for name, content in found.items()]
    return sorted(made, key=lambda point: (point.bytes, point.name))


def _point(name: str, foreseen: Json, measured: Json) -> Point:
    return Point(
        name=name,
        bits=foreseen["bits_per_weight"],
        bytes=int(foreseen["bytes"]),
        foreseen_kl=foreseen["kl"],
        foreseen=foreseen["perplexity"] - 1,
        kl=measured["kl"],
        growth=measured["perplexity"] - 1,
        error=measured["error"],
        top1=measured["top1"],
        tokens=measured["tokens"],
    )


def judged(found: Sequence[Point]) -> Judgement:
    """Return a judgement of the estimates, given the points."""
    different = list({(point.foreseen_kl, point.kl): point for point in found}.values())
    correlation = _spearman(different)
    if correlation is None:
        return Judgement(None, ("Too few different points were measured to say whether estimates rank as they do.",))
    text = f"Over {len(different)} different points, foreseen and measured divergence have a rank correlation of "
    sentences = [f"{text}{correlation:.3f} (Spearman)."]
    if correlation < ALIKE:
        unsure = "on this model the sum of single costs foretells little; choose by the measured points"
        sentences.append(f"That is under {ALIKE}: {unsure}.")
    front = [point for point in found if point.name not in OFF_THE_FRONT]
    crossed = [(a, b) for a, b in pairwise(front) if a.bytes < b.bytes and a.kl < b.kl]
    sentences += [
        f"The measured front is not monotone: {b.called} reads more than {a.called} and diverges more "
        f"({b.kl:.4f} and {a.kl:.4f} nat)."
        for a, b in crossed
    ]
    if not crossed:
        sentences.append("The measured front is monotone: whatever reads more diverges less.")
    return Judgement(correlation, tuple(sentences))


def _spearman(found: Sequence[Point]) -> float | None:
    """Return the rank correlation; None for fewer than three points, or if one variable is constant."""
    from scipy.stats import spearmanr

    pairs = [(point.foreseen_kl, point.kl) for point in found]
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
    words += f"; diamonds: measured on {points[0].tokens} tokens" if points else ""
    draw = partial(_draw_front, search=search, points=points)
    return Plot("front", title, words, False, figure("front", title, draw, HALF))


def _draw_front(axes: Axes, search: Json, points: Sequence[Point]) -> None:
    """Draw the perplexity's growth over bits per weight."""
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
