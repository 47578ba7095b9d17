"""The page: a build's files in, one self-contained HTML text out. It holds nothing that its inputs do not say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from shardmill.report import wording
from shardmill.report.dag import drawings
from shardmill.report.gates import questions
from shardmill.report.plots import plots
from shardmill.report.provenance import origin
from shardmill.report.read import Build, Json, Piece
from shardmill.report.residency import STATUS, placement
from shardmill.report.stages import STATES, steps
from shardmill.report.verdict import verdict

TOLERANCE = 1.1
FILTERS = (
    "engine",
    "fixed",
    "margin",
    "marked",
    "number",
    "percent",
    "plural",
    "sentence",
    "short",
    "size",
    "threshold",
)


def environment() -> Environment:
    """Templates of this package: everything escaped, a missing name is an error."""
    made = Environment(
        loader=PackageLoader("shardmill.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {name: getattr(wording, name) for name in FILTERS}
    return made


def render(build: Build) -> str:
    """report.html."""
    return environment().get_template("page.html").render(context(build))


def context(build: Build) -> dict[str, Any]:
    """What the templates show."""
    asked = questions(build)
    return {
        "model": build.model,
        "plan": build.plan,
        "settings": build.settings,
        "verdict": verdict(build, asked),
        "questions": asked,
        "engines": sorted({wording.engine(file["engine"]) for file in (*build.parity, *build.residency)}),
        "dag": drawings(steps(build)),
        "states": STATES,
        "pieces": build.pieces,
        "limit": build.plan["weight_file_limit"],
        "state_bytes": {piece.name: state_bytes(piece, build) for piece in build.pieces},
        "placement": placement(build.residency),
        "statuses": STATUS,
        "speed": build.speed,
        "noisy": noisy(build.speed["rows"]),
        "plots": plots(build.speed["rows"]),
        "origin": origin(build),
    }


def state_bytes(piece: Piece, build: Build) -> int:
    """Bytes of a part's key/value states: k and v, fp16 [kv_heads, S, head_dim] per layer. Heads have none."""
    if piece.kind != "layers":
        return 0
    graph = build.plan["architecture"]["graph"]
    per_layer = 2 * graph["kv_heads"] * build.plan["context"] * graph["head_dim"] * 2
    return int((piece.end - piece.start) * per_layer)


def noisy(rows: Sequence[Json]) -> list[int]:
    """Prompt lengths whose speed-up is more than its cause can give: a pass never costs less than one token's."""
    return [row["prompt_tokens"] for row in rows if row["speedup"] > TOLERANCE * row["tokens_per_pass"]]
