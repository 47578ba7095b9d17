"""The benchmark's figures as inline SVG, the same bytes for the same numbers.

No date, fixed ids, text as text. Colours are written as stand-ins and turned into the page's own, so that one drawing
serves light, dark and print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardmill.report.read import Json

# Stand-in -> colour of the style sheet.
COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--faint)",
    "#030303": "var(--line)",
    "#040404": "var(--one)",
    "#050505": "var(--two)",
    "#060606": "var(--three)",
}
INK, FAINT, LINE, ONE, TWO, THREE = COLOURS
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "shardmill",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # the one that matplotlib brings along, so that no machine lays out differently
    "font.size": 9,
    "text.parse_math": False,
    "axes.edgecolor": LINE,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": LINE,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "ytick.major.size": 0,
}
UNDATED = dict.fromkeys(("Creator", "Date", "Format", "Type"))
SIZE = (3.9, 2.65)  # inches


@dataclass(frozen=True)
class Plot:
    """A drawing with the words that stand beside it."""

    title: str
    note: str
    svg: Markup


def plots(rows: Sequence[Json]) -> list[Plot]:
    """Speed-up, throughput and tokens per pass over prompt length; none if nothing was measured."""
    wanted = (
        ("speedup", "Speed-up by n-gram speculation", "dashed: as fast as decoding at T = 1", draw_speedup),
        ("throughput", "Tokens per second", "", draw_throughput),
        ("passes", "Tokens per pass with n-gram drafts", "dashed: one, where no draft is accepted", draw_passes),
    )
    return [Plot(title, note, figure(name, title, rows, draw)) for name, title, note, draw in wanted if rows]


def draw_speedup(axes: Axes, rows: Sequence[Json]) -> None:
    """Speed-up with the line below which drafting is a loss."""
    nothing_won(axes)
    series(axes, rows, "speedup", ONE, "n-gram over T = 1", "{:.2f} ×")


def draw_throughput(axes: Axes, rows: Sequence[Json]) -> None:
    """Prefill, speculation and plain decoding; the table has the figures."""
    series(axes, rows, "prefill_tok_s", THREE, "prefill, T = max")
    series(axes, rows, "ngram_tok_s", ONE, "decode, n-grams")
    series(axes, rows, "decode_tok_s", TWO, "decode, T = 1")
    axes.legend(
        frameon=False,
        loc="lower center",
        bbox_to_anchor=(0.46, 1.0),
        ncols=3,
        fontsize=8.4,
        handlelength=1,
        columnspacing=0.9,
        handletextpad=0.4,
        borderaxespad=0,
    )


def draw_passes(axes: Axes, rows: Sequence[Json]) -> None:
    """Tokens that one pass yields; without drafts it is one."""
    nothing_won(axes)
    series(axes, rows, "tokens_per_pass", ONE, "n-gram drafts", "{:.2f}")


def series(axes: Axes, rows: Sequence[Json], key: str, colour: str, label: str, form: str = "") -> None:
    """One line, its values written over the points if `form` says how; lengths without a value are left out."""
    known = [(i, row[key]) for i, row in enumerate(rows) if row[key] is not None]
    axes.plot([i for i, _ in known], [v for _, v in known], marker="o", ms=4.5, lw=1.8, color=colour, label=label)
    for i, value in known if form else ():
        axes.annotate(form.format(value), (i, value), (0, 7), textcoords="offset points", ha="center", color=INK)


def nothing_won(axes: Axes) -> None:
    """The line at 1."""
    axes.axhline(1, color=FAINT, lw=1, dashes=(4, 3))


def figure(name: str, title: str, rows: Sequence[Json], draw: Any) -> Markup:
    """One plot over prompt length, each length equally wide."""
    with rc_context():
        rcdefaults()  # no user's own settings
        rcParams.update(STYLE)
        fig = Figure(figsize=SIZE, layout="constrained")
        axes = fig.add_subplot()
        draw(axes, rows)
        lengths = [str(row["prompt_tokens"]) for row in rows]
        axes.set_xticks(range(len(rows)), lengths)
        axes.set_xlim(-0.45, len(rows) - 0.55)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
        axes.set_xlabel("prompt tokens")
        axes.grid(axis="y", lw=0.6)
        axes.set_axisbelow(True)
        text = io.StringIO()
        fig.savefig(text, format="svg", metadata=UNDATED, transparent=True)
    return inline(text.getvalue(), name, title)


def inline(svg: str, name: str, title: str) -> Markup:
    """The <svg> element alone: sized by the page, its ids its own, its colours the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", svg)
    svg = re.sub(r"(font: [\d.]+px) [^;\"]*", r"\1 var(--sans)", svg)
    for stand_in, colour in COLOURS.items():
        svg = svg.replace(stand_in, colour)
    head = Markup('<svg class="plot" role="img" aria-label="{}"').format(title)
    body = re.sub(r'^<svg|\s(width|height)="[\d.]+pt"', "", svg[: svg.index(">")]) + svg[svg.index(">") :]
    return head + Markup(body)  # matplotlib's own output; no text of the build is in it
