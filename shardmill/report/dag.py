"""The pipeline as a drawing: a box per step with its state and a dot per artifact; one wide layout, one for a phone.

Plain SVG, built as text: every word in it is escaped, colours come from the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from shardmill.report.read import Json
from shardmill.report.stages import STATES, Step

Rows = Sequence[Json]


@dataclass(frozen=True)
class Place:
    """Where a box stands: its rank along the flow, and its lane across it."""

    rank: int
    lane: float


def places(rows: Rows) -> dict[str, Place]:
    """Every step as far along as it must be to come after all that it reads from."""
    found: dict[str, Place] = {}
    for row in rows:
        rank = 1 + max((found[name].rank for name in row["after"] if name in found), default=-1)
        found[row["name"]] = Place(rank, row["lane"])
    return found


def edges(rows: Rows) -> list[tuple[str, str]]:
    """From each step to those that come after it; none that goes without saying, as another way leads there."""
    before: dict[str, set[str]] = {}  # every step that must be done
    for row in rows:
        before[row["name"]] = set(row["after"]).union(*(before.get(name, set()) for name in row["after"]))
    return [
        (name, row["name"])
        for row in rows
        for name in row["after"]
        if not any(name in before.get(other, set()) for other in row["after"] if other != name)
    ]


@dataclass(frozen=True)
class Layout:
    """Sizes in user units; `down` lets the flow run from top to bottom."""

    name: str
    down: bool
    width: float  # of a box
    height: float
    along: float  # from one rank to the next
    across: float  # from one lane to the next

    def corner(self, place: Place) -> tuple[float, float]:
        """Upper left corner of a step's box."""
        along, across = place.rank * self.along + 4, place.lane * self.across + 4
        return (across, along) if self.down else (along, across)

    def extent(self, places: Collection[Place]) -> tuple[float, float]:
        """Width and height of the drawing."""
        corners = [self.corner(place) for place in places]
        x, y = (max(corner[i] for corner in corners) for i in (0, 1))
        return x + self.width + 4, y + self.height + 4


WIDE = Layout("wide", False, 122, 74, 144, 92)
NARROW = Layout("narrow", True, 98, 70, 98, 104)


def drawings(steps: Mapping[str, Step], rows: Rows) -> Markup:
    """Both layouts; the style sheet shows the one that fits.

    Args:
        steps: with their states.
        rows: the pipeline, see pipeline.dag.drawn.
    """
    return Markup("\n").join(draw(steps, rows, layout) for layout in (WIDE, NARROW))


def draw(steps: Mapping[str, Step], rows: Rows, layout: Layout) -> Markup:
    """One drawing."""
    where = places(rows)
    width, height = layout.extent(where.values())
    label = "; ".join(f"{s.name}: {STATES[s.state]}" for s in steps.values())
    lines = Markup("\n").join(edge(where[a], where[b], layout) for a, b in edges(rows))
    boxes = Markup("\n").join(box(step, where[name], layout) for name, step in steps.items())
    return Markup(
        '<svg class="dag {}" viewBox="0 0 {:g} {:g}" role="img" aria-label="Pipeline. {}">\n{}\n{}\n</svg>'
    ).format(layout.name, width, height, label, lines, boxes)


def edge(first: Place, second: Place, layout: Layout) -> Markup:
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


def box(step: Step, place: Place, layout: Layout) -> Markup:
    """A step: name, amount, state, and a dot per artifact with its own state."""
    x, y = layout.corner(place)
    lines = ((18, "name", step.name), (33, "amount", step.amount), (49, "state", STATES[step.state]))
    texts = Markup("").join(
        Markup('<text class="{}" x="{:g}" y="{:g}">{}</text>').format(style, x + 10, y + down, text)
        for down, style, text in lines
    )
    return Markup('<g class="step is-{}"><rect x="{:g}" y="{:g}" width="{:g}" height="{:g}" rx="7"/>{}{}</g>').format(
        step.state, x, y, layout.width, layout.height, texts, _dots(step, x + 13, y + 61, layout)
    )


def _dots(step: Step, x: float, y: float, layout: Layout) -> Markup:
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
