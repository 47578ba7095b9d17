"""Figures as inline SVG, the same bytes for the same numbers.

No date, fixed ids, text as text. Colours are written as stand-ins and turned into the page's own, so that one drawing
serves light, dark and print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Stand-in -> colour of the style sheet.
COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--faint)",
    "#030303": "var(--line)",
    "#040404": "var(--one)",
    "#050505": "var(--two)",
    "#060606": "var(--three)",
    "#070707": "var(--four)",
    "#080808": "var(--five)",
}
INK, FAINT, LINE, *SERIES = COLOURS
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
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "ytick.major.size": 0,
}
UNDATED = dict.fromkeys(("Creator", "Date", "Format", "Type"))
HEIGHT, HALF, WHOLE = 3.0, 5.6, 11.4  # inches; a half stands beside another one

STYLE_SHEET = "templates/style.css"

Draw = Callable[[Axes], None]


def figure(name: str, title: str, draw: Draw, width: float = HALF) -> Markup:
    """One drawing; `name` keeps its ids apart from those of others on the page."""
    with rc_context():
        rcdefaults()  # no user's own settings
        rcParams.update(STYLE)
        fig = Figure(figsize=(width, HEIGHT), layout="constrained")
        draw(fig.add_subplot())
        text = io.StringIO()
        fig.savefig(text, format="svg", metadata=UNDATED, transparent=True)
    return inline(text.getvalue(), name, title)


def legend(axes: Axes) -> None:
    """What the colours mean, in one line above the drawing."""
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(handles),
        handlelength=1.4,
        columnspacing=1.1,
        handletextpad=0.5,
        borderaxespad=0,
    )


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
    return head + Markup(body)  # texts in it are escaped by matplotlib


def alone(svg: Markup) -> str:
    """A figure as a file of its own: with the colours that the page has by day."""
    sheet = files("shardmill.report").joinpath(STYLE_SHEET).read_text(encoding="utf-8")
    colours = sheet[: sheet.index("}") + 1]  # the sheet's first rule
    head, _, body = str(svg).partition(">")
    return f"{head}><style>{colours}</style>{body}\n"
