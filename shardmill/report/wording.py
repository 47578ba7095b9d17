"""Formats values for the page. An unknown value is named as such, never shown as 0 or left empty."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape
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
    "font.family": "DejaVu Sans",  # matplotlib includes this font, so the layout is the same on every machine
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
HEIGHT, HALF, WHOLE = 3.0, 5.6, 11.4  # inches; two figures of half width stand side by side

STYLE_SHEET = "templates/style.css"

Draw = Callable[[Axes], None]


def figure(name: str, title: str, draw: Draw, width: float = HALF) -> Markup:
    """Return one drawing; `name` makes its ids different from the ids of other drawings on the page."""
    with rc_context():
        rcdefaults()  # ignore the user's settings
        rcParams.update(STYLE)
        fig = Figure(figsize=(width, HEIGHT), layout="constrained")
        draw(fig.add_subplot())
        text = io.StringIO()
        fig.savefig(text, format="svg", metadata=UNDATED, transparent=True)
    return _inline_code(text.getvalue(), name, title)


def legend(axes: Axes) -> None:
    """Draw a legend of the colours in one line above the plot."""
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


def _inline_code(svg: str, name: str, title: str) -> Markup:
    """Return only the <svg> element: with unique ids, and with the size and colours that the page sets."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", svg)
    svg = re.sub(r"(font: [\d.]+px) [^;\"]*", r"\1 var(--sans)", svg)
    for stand_in, colour in COLOURS.items():
        svg = svg.replace(stand_in, colour)
    head = Markup('<svg class="plot" role="img" aria-label="{}"').format(title)
    body = re.sub(r'^<svg|\s(width|height)="[\d.]+pt"', "", svg[: svg.index(">")]) + svg[svg.index(">") :]
    return head + Markup(body)  # matplotlib escapes the texts in it


def alone(svg: Markup) -> str:
    """Return a figure as a separate file, with the colours of the page's light theme."""
    sheet = files("shardmill.report").joinpath(STYLE_SHEET).read_text(encoding="utf-8")
    colours = sheet[: sheet.index("}") + 1]  # the sheet's first rule
    head, _, body = str(svg).partition(">")
    return f"{head}><style>{colours}</style>{body}\n"


NOT_RUN = "not run"
LONGEST_WHOLE = 24  # characters that fit on a line of a phone
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
ENGINES = {"portable": "portable engine (CPU, torch)", "coreml": "Core ML", "coreai": "Apple's Core AI runtime"}


def number(value: float | None) -> str:
    """Return at most four significant digits; small numbers as 3.7e-7; thousands separated; None as "not run"."""
    if value is None:
        return NOT_RUN
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\u202f")
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}" if abs(value) < 1e4 else number(round(value))


def fixed(value: float | None, digits: int = 1) -> str:
    """Return a number with a fixed number of decimals, so that a table's column lines up."""
    return NOT_RUN if value is None else f"{value:.{digits}f}"


def threshold_text(text: str) -> str:
    """Return `<= 0.0001` as `≤ 1e-4`."""
    sign, _, limit = text.partition(" ")
    try:
        return f"{'≥' if sign == '>=' else '≤'}\u00a0{number(float(limit))}"
    except ValueError:
        return text


def margin(value: float, text: str) -> str:
    """Return how far a value is from its threshold: `150 × under`, or the difference if a ratio tells little."""
    sign, _, written = text.partition(" ")
    limit = float(written)
    side = "over" if value > limit else "under"
    if value == limit:
        return "none allowed" if limit == 0 else "at the limit"
    if sign == "<=" and 0 < value < limit / 2:
        return f"{number(float(f'{limit / value:.2g}'))} × under"
    return f"{number(float(f'{abs(value - limit):.2g}'))} {side}"


def file_size(count: int | None) -> str:
    """Return bytes in binary units."""
    if count is None:
        return "missing"
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g}\u00a0{UNITS[unit]}" if unit and value < 1000 else f"{value:.0f}\u00a0{UNITS[unit]}"


def percent(part: float | None, whole: float = 1.0) -> str:
    """Return a share in percent; a share that is too small to show is marked as such."""
    if part is None:
        return NOT_RUN
    share = 100 * part / whole
    return "<\u00a00.1\u00a0%" if 0 < share < 0.1 else f"{share:.3g}\u00a0%"


def short(sha: str) -> str:
    """Return the first twelve digits of a hash."""
    return sha[:12]


def engine_text(identity: Mapping[str, Any]) -> str:
    """Return the readable name of an engine, given its entry in a receipt."""
    name = ENGINES.get(identity["name"], identity["name"])
    chip = [str(identity[key]) for key in ("chip",) if key in identity]
    system = [f"macOS {identity['macos']} ({identity['build']})"] if "macos" in identity else []
    version = [identity["version"]] if identity["name"] == "coreai" else []
    return ", ".join([name, *version, *system, *chip])


def plural(count: int, word: str) -> str:
    """Return `1 part`, `8 parts`."""
    return f"{number(count)} {word}{'' if count == 1 else 's'}"


def sentence(text: str) -> str:
    """Return the text with a capital letter, unless it starts with an identifier, and a full stop."""
    first = text.split(" ")[0]
    start = text[:1].upper() if first.isalpha() else text[:1]
    return f"{start}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


def marked(text: str) -> Markup:
    """Return the text escaped, with `text in backticks` as code; short code is never broken."""

    def code(match: re.Match[str]) -> str:
        style = ' class="whole"' if len(match[1]) <= LONGEST_WHOLE else ""
        return f"<code{style}>{match[1]}</code>"

    return Markup(re.sub(r"`([^`]*)`", code, str(escape(text))))
