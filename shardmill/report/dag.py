"""The pipeline as a drawing: a box per step with its state and a dot per artifact; one wide layout, one for a phone.

Plain SVG, built as text: every word in it is escaped, colours come from the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from shardmill.report.stages import STATES, Step

# (rank along the flow, lane across it)
PLACES = {
    "fetch": (0, 1.5),
    "split": (1, 1.5),
    "embedding": (2, 0),
    "reference": (2, 1),
    "convert": (2, 2.5),
    "compile": (3, 2.5),
    "parity": (4, 0.75),
    "residency": (4, 2.25),
    "model.json": (5, 1.5),
    "benchmark": (6, 0.75),
    "provenance": (6, 2.25),
    "report": (7, 0.75),
}
EDGES = (
    ("fetch", "split"),
    ("split", "embedding"),
    ("split", "reference"),
    ("split", "convert"),
    ("embedding", "parity"),
    ("reference", "parity"),
    ("convert", "compile"),
    ("compile", "parity"),
    ("compile", "residency"),
    ("parity", "model.json"),
    ("residency", "model.json"),
    ("model.json", "benchmark"),
    ("benchmark", "report"),
    ("model.json", "provenance"),
)
RANKS = 1 + max(rank for rank, _ in PLACES.values())
LANES = 1 + max(lane for _, lane in PLACES.values())


@dataclass(frozen=True)
class Layout:
    """Sizes in user units; `down` lets the flow run from top to bottom."""

    name: str
    down: bool
    width: float  # of a box
    height: float
    along: float  # from one rank to the next
    across: float  # from one lane to the next

    def corner(self, step: str) -> tuple[float, float]:
        """Upper left corner of a step's box."""
        rank, lane = PLACES[step]
        return (
            (lane * self.across + 4, rank * self.along + 4)
            if self.down
            else (rank * self.along + 4, lane * self.across + 4)
        )

    @property
    def extent(self) -> tuple[float, float]:
        """Width and height of the drawing."""
        along, across = (RANKS - 1) * self.along, (LANES - 1) * self.across
        x, y = (across, along) if self.down else (along, across)
        return x + self.width + 8, y + self.height + 8


WIDE = Layout("wide", False, 122, 74, 144, 92)
NARROW = Layout("narrow", True, 98, 70, 98, 104)


def drawings(steps: Mapping[str, Step]) -> Markup:
    """Both layouts; the style sheet shows the one that fits."""
    return Markup("\n").join(draw(steps, layout) for layout in (WIDE, NARROW))


def draw(steps: Mapping[str, Step], layout: Layout) -> Markup:
    """One drawing."""
    width, height = layout.extent
    label = "; ".join(f"{s.name}: {STATES[s.state]}" for s in steps.values())
    lines = Markup("\n").join(edge(a, b, layout) for a, b in EDGES)
    boxes = Markup("\n").join(box(step, layout) for step in steps.values())
    return Markup(
        '<svg class="dag {}" viewBox="0 0 {:g} {:g}" role="img" aria-label="Pipeline. {}">\n{}\n{}\n</svg>'
    ).format(layout.name, width, height, label, lines, boxes)


def edge(first: str, second: str, layout: Layout) -> Markup:
    """A curve from the end of one box to the start of another."""
    (x1, y1), (x2, y2) = layout.corner(first), layout.corner(second)
    if layout.down:
        x1, y1, x2 = x1 + layout.width / 2, y1 + layout.height, x2 + layout.width / 2
        bend1, bend2 = (x1, (y1 + y2) / 2), (x2, (y1 + y2) / 2)
    else:
        x1, y1, y2 = x1 + layout.width, y1 + layout.height / 2, y2 + layout.height / 2
        bend1, bend2 = ((x1 + x2) / 2, y1), ((x1 + x2) / 2, y2)
    path = f"M{x1:g} {y1:g}C{bend1[0]:g} {bend1[1]:g} {bend2[0]:g} {bend2[1]:g} {x2:g} {y2:g}"
    return Markup('<path class="edge" d="{}"/>').format(path)


def box(step: Step, layout: Layout) -> Markup:
    """A step: name, amount, state, and a dot per artifact with its own state."""
    x, y = layout.corner(step.name)
    lines = ((18, "name", step.name), (33, "amount", step.amount), (49, "state", STATES[step.state]))
    texts = Markup("").join(
        Markup('<text class="{}" x="{:g}" y="{:g}">{}</text>').format(style, x + 10, y + down, text)
        for down, style, text in lines
    )
    return Markup('<g class="step is-{}"><rect x="{:g}" y="{:g}" width="{:g}" height="{:g}" rx="7"/>{}{}</g>').format(
        step.state, x, y, layout.width, layout.height, texts, dots(step, x + 13, y + 61, layout)
    )


def dots(step: Step, x: float, y: float, layout: Layout) -> Markup:
    """A dot per artifact; where the box has no room for all, how many more there are."""
    room = int((layout.width - 16) // 8)
    shown = step.artifacts if len(step.artifacts) <= room else step.artifacts[: room - 3]
    drawn = Markup("").join(
        Markup('<circle class="is-{}" cx="{:g}" cy="{:g}" r="2.6"><title>{}: {}</title></circle>').format(
            state, x + 8 * i, y, name, STATES[state]
        )
        for i, (name, state) in enumerate(shown)
    )
    more = len(step.artifacts) - len(shown)
    if not more:
        return drawn
    return drawn + Markup('<text class="amount" x="{:g}" y="{:g}">+{}</text>').format(x + 8 * len(shown), y + 4, more)
