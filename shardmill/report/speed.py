"""benchmark/speed.json as the page shows it: rows in groups, and the values that drafting can't explain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from shardmill.report.read import Json
from shardmill.report.wording import FAINT, HALF, INK, SERIES, WHOLE, Draw, figure, legend

TOLERANCE = 1.1  # tolerance of a ratio of times
CONTROL = "none"  # the drafter that never drafts: T = 1 against itself


@dataclass(frozen=True)
class SpeedGroup:
    """One prompt length, or one task, with a row per drafter."""

    name: str
    prompts: int
    rows: tuple[Json, ...]


def speed_groups(rows: Sequence[Json]) -> tuple[SpeedGroup, ...]:
    """Return the rows of the sweep or of the tasks by prompt length or task, in the file's order."""
    names = dict.fromkeys(_name_of(row) for row in rows)
    groups = ((name, tuple(row for row in rows if _name_of(row) == name)) for name in names)
    return tuple(SpeedGroup(name, same[0]["prompts"], same) for name, same in groups)


def _name_of(row: Json) -> str:
    """Return the row's task in words, or its prompt length."""
    return str(row["task"]).replace("_", " ") if "task" in row else str(row["prompt_tokens"])


def described(row: Json) -> str:
    """Return the row's group in words that fit into a sentence."""
    return _name_of(row) if "task" in row else f"{row['prompt_tokens']} tokens"


def drafters(rows: Sequence[Json]) -> tuple[str, ...]:
    """Return the drafters except `none`, in the file's order."""
    return tuple(dict.fromkeys(row["drafter"] for row in rows if row["drafter"] != CONTROL))


def noisy(speed: Json) -> tuple[str, ...]:
    """Return groups with a ratio of times that drafting can't cause: other work on the machine changed the times.

    A pass never takes less time than a pass of one token, so the speed-up is at most the tokens per pass. T = 1,
    compared with itself, has a speed-up of 1.
    """
    names = [
        described(row)
        for row in measured_speed(speed)
        if row["speedup"] > TOLERANCE * row["live"]["tokens_per_pass"]
        or (row["drafter"] == CONTROL and row["speedup"] * TOLERANCE < 1)
    ]
    return tuple(dict.fromkeys(names))


def close_calls(row: Json, margin: float) -> bool:
    """Return whether all tokens that drafting changed are close calls, which another width of a pass may change.

    Args:
        row: a row of the sweep or the tasks.
        margin: how close two logits must be for a close call; 0 on an engine that rounds all widths alike.
    """
    return all(0 <= float(d.get("margin") or 0.0) < margin for d in row["differs"])


def measured_speed(speed: Json) -> Iterator[Json]:
    """Yield all rows."""
    yield from speed["sweep"]
    yield from speed["tasks"]


def by_position(rows: Sequence[Json], drafter: str, kind: str) -> list[float]:
    """Return the share of accepted drafts by draft position, over a drafter's rows; `kind` is live or oracle."""
    counted = [row[kind]["by_position"] for row in rows if row["drafter"] == drafter and row[kind] is not None]
    longest = max((len(positions) for positions in counted), default=0)
    sums = [[sum(c[i][j] for c in counted if i < len(c)) for j in (0, 1)] for i in range(longest)]
    return [accepted / drafted for accepted, drafted in sums if drafted]


MARKERS = "os^Dv"
AS_FAST = "dashed: as fast as T = 1"
KINDS = (("live", "live", "of those that were verified"), ("oracle", "replayed", "of all that could be proposed"))


@dataclass(frozen=True)
class Plot:
    """A drawing with the text beside it."""

    name: str
    title: str
    note: str
    wide: bool
    svg: Markup


@dataclass(frozen=True)
class Series:
    """The style of a drafter, the same in every figure."""

    name: str
    colour: str
    marker: str


def drawn(name: str, title: str, note: str, draw: Draw, width: float = HALF) -> Plot:
    """Return a figure of this width in inches."""
    return Plot(name, title, note, width == WHOLE, figure(name, title, draw, width))


def plots(speed: Json) -> list[Plot]:
    """Return the figures that the measurements allow."""
    sweep, tasks = speed["sweep"], speed["tasks"]
    names = drafters(tuple(measured_speed(speed)))
    series = [Series(name, SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)]
    figures = []
    if sweep and series:
        title = "Speed-up over prompt length, tiled code"
        figures.append(drawn("sweep", title, AS_FAST, partial(_draw_sweep, rows=sweep, series=series)))
    if len(speed["pass_seconds"]) > 1:
        note = "dotted: T = 1 decoding; where it crosses the wide pass, drafting breaks even"
        figures.append(drawn("widths", "Time of a pass by its width", note, partial(_draw_widths, speed=speed)))
    for kind, words, of in KINDS if series else ():
        rows, note = (tasks, f"{of}, all tasks") if tasks else (sweep, f"{of}, tiled code")
        title = f"Drafts accepted by position, {words}"
        draw = partial(_draw_positions, rows=rows, series=series, kind=kind)
        figures.append(drawn(f"{kind}-position", title, note, draw))
    if tasks and series:
        note = "bar: live; line across it: replayed, an upper bound"
        draw = partial(_draw_passes, rows=tasks, series=series)
        figures.append(drawn("task-passes", "Tokens per pass by task", note, draw, WHOLE))
        draw = partial(_draw_tasks, rows=tasks, series=series)
        figures.append(drawn("task-speedup", "Speed-up by task", AS_FAST, draw, WHOLE))
    return figures


def _draw_sweep(axes: Axes, rows: Sequence[Json], series: Sequence[Series]) -> None:
    """Draw a line per drafter over prompt length, in equal steps, and label the best value for each length."""
    lengths = [group.name for group in speed_groups(rows)]
    for one in series:
        known = {_name_of(row): row["speedup"] for row in rows if row["drafter"] == one.name}
        _line(axes, one, [(lengths.index(name), value) for name, value in known.items()])
    for i, group in enumerate(speed_groups(rows)):
        best = max(row["speedup"] for row in group.rows)
        note(axes, f"{best:.2f} ×", (i, best), (0, 7), "center")
    axes.axhline(1, color=FAINT, lw=1, dashes=(4, 3))
    axes.set_xticks(range(len(lengths)), lengths)
    axes.set_xlim(-0.4, len(lengths) - 0.6)
    axes.set_xlabel("prompt tokens")
    _finish(axes)


def _draw_widths(axes: Axes, speed: Json) -> None:
    """Draw the times of passes, and the time that passes of T = 1 take for the same number of tokens."""
    took = {int(width): 1e3 * seconds for width, seconds in speed["pass_seconds"].items()}
    narrow, wide = min(took), max(took)
    meets = speed["break_even"]
    axes.plot([0, wide], [0, took[narrow] * wide], color=FAINT, lw=1.4, ls=":")
    axes.plot([0, wide], [took[wide]] * 2, color=SERIES[0], lw=1.2, alpha=0.5)
    axes.plot([meets] * 2, [0, took[wide]], color=SERIES[1], lw=1.2, dashes=(4, 3))
    axes.plot(list(took), list(took.values()), "o", ms=6, color=SERIES[0])
    for width, milliseconds in took.items():
        note(axes, f"T = {width}: {milliseconds:.3g} ms", (width, milliseconds), (-4, 8), "right")
    note(axes, f"pays above {meets:.2f} tokens per pass", (meets, 0), (6, 6), "left")
    axes.set_xlim(0, wide + 0.15)
    axes.set_xticks(range(wide + 1))
    axes.set_xlabel("tokens")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(0, 1.7 * max(took.values()))


def _draw_positions(axes: Axes, rows: Sequence[Json], series: Sequence[Series], kind: str) -> None:
    """Draw a line per drafter over draft position."""
    most = 1
    for one in series:
        shares = by_position(rows, one.name, kind)
        most = max(most, len(shares))
        _line(axes, one, list(enumerate(shares, start=1)))
    axes.set_xticks(range(1, most + 1))
    axes.set_xlim(0.7, most + 0.3)
    axes.set_xlabel("draft position")
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    legend(axes)


def _draw_passes(axes: Axes, rows: Sequence[Json], series: Sequence[Series]) -> None:
    """Draw a bar per task and drafter, with a line across it at the replay's value."""
    live = [row["live"]["tokens_per_pass"] for row in rows]
    replayed = [row["oracle"]["tokens_per_pass"] if row["oracle"] else 0.0 for row in rows]
    highest = [max(pair) for pair in zip(live, replayed, strict=True)]
    width = _bars(axes, rows, series, live, highest)
    for i, group in enumerate(speed_groups(rows)):
        for row in group.rows:
            if row["oracle"] is not None and row["drafter"] in {one.name for one in series}:
                middle, height = _legend_place(i, row["drafter"], series, width), row["oracle"]["tokens_per_pass"]
                axes.plot([middle - 0.46 * width, middle + 0.46 * width], [height] * 2, color=INK, lw=1.6)
    _finish(axes)


def _draw_tasks(axes: Axes, rows: Sequence[Json], series: Sequence[Series]) -> None:
    """Draw a bar per task and drafter."""
    values = [row["speedup"] for row in rows]
    _bars(axes, rows, series, values, [max(value, 1) for value in values])  # nothing is written across the line at 1
    axes.axhline(1, color=INK, lw=1, dashes=(4, 3))
    _finish(axes)


def _bars(
    axes: Axes, rows: Sequence[Json], series: Sequence[Series], values: Sequence[float], tops: Sequence[float]
) -> float:
    """Draw a bar per group and drafter, with its value above `tops`; return the width of a bar."""
    names = [group.name for group in speed_groups(rows)]
    width = 0.84 / len(series)
    for one in series:
        mine = [i for i, row in enumerate(rows) if row["drafter"] == one.name]
        middles = [_legend_place(names.index(_name_of(rows[i])), one.name, series, width) for i in mine]
        axes.bar(middles, [values[i] for i in mine], 0.9 * width, color=one.colour, label=one.name)
        for middle, i in zip(middles, mine, strict=True):
            note(axes, f"{values[i]:.2f}", (middle, tops[i]), (0, 4), "center")
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.55, len(names) - 0.45)
    axes.tick_params(axis="x", length=0)
    return width


def _legend_place(group: int, drafter: str, series: Sequence[Series], width: float) -> float:
    """Return the middle of a drafter's bar."""
    index = [one.name for one in series].index(drafter)
    return group + (index - (len(series) - 1) / 2) * width


def _line(axes: Axes, one: Series, points: Sequence[tuple[float, float]]) -> None:
    """Draw a drafter's line."""
    x, y = [p[0] for p in points], [p[1] for p in points]
    axes.plot(x, y, marker=one.marker, ms=5, lw=1.8, color=one.colour, label=one.name)


def note(axes: Axes, text: str, point: tuple[float, float], away: tuple[float, float], align: str) -> None:
    """Write a text at a distance from a point, in typographic points."""
    axes.annotate(text, point, away, textcoords="offset points", ha=align, color=INK)


def _finish(axes: Axes) -> None:
    """Scale the axes from zero, with room above the highest value, and add a legend."""
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    legend(axes)
