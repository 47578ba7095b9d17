"""benchmark/speed.json as the page shows it: rows under their groups, and what in them can't be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardmill.report.read import Json

TOLERANCE = 1.1  # of a ratio of times
CONTROL = "none"  # the drafter that never drafts: T = 1 against itself


@dataclass(frozen=True)
class Group:
    """One prompt length, or one task, with a row per drafter."""

    name: str
    prompts: int
    rows: tuple[Json, ...]


def groups(rows: Sequence[Json]) -> tuple[Group, ...]:
    """Rows of the sweep or of the tasks under what they are of, in the file's order."""
    names = dict.fromkeys(name_of(row) for row in rows)
    found = ((name, tuple(row for row in rows if name_of(row) == name)) for name in names)
    return tuple(Group(name, same[0]["prompts"], same) for name, same in found)


def name_of(row: Json) -> str:
    """The row's task in words, or its prompt length."""
    return str(row["task"]).replace("_", " ") if "task" in row else str(row["prompt_tokens"])


def described(row: Json) -> str:
    """The row's group, to stand in a sentence."""
    return name_of(row) if "task" in row else f"{row['prompt_tokens']} tokens"


def drafters(rows: Sequence[Json]) -> tuple[str, ...]:
    """Drafters that draft, in the file's order."""
    return tuple(dict.fromkeys(row["drafter"] for row in rows if row["drafter"] != CONTROL))


def noisy(speed: Json) -> tuple[str, ...]:
    """Groups with a ratio of times that drafting can't cause, so something else on the machine did.

    A pass never costs less than one token's, so the speed-up is at most the tokens per pass; and T = 1 is as fast as
    itself.
    """
    return tuple(dict.fromkeys(described(row) for row in measured(speed) if impossible(row)))


def impossible(row: Json) -> bool:
    """Whether a row's ratio is beyond what its cause can give."""
    if row["speedup"] > TOLERANCE * row["live"]["tokens_per_pass"]:
        return True
    return bool(row["drafter"] == CONTROL and row["speedup"] * TOLERANCE < 1)


def close_calls(row: Json, margin: float) -> bool:
    """Return whether all that drafting changed are close calls: another width of a pass may turn them.

    Args:
        row: of the sweep or the tasks.
        margin: how close two logits are that it may turn; 0 on an engine that rounds all widths alike.
    """
    return all(0 <= float(d.get("margin") or 0.0) < margin for d in row["differs"])


def measured(speed: Json) -> Iterator[Json]:
    """All rows."""
    yield from speed["sweep"]
    yield from speed["tasks"]


def by_position(rows: Sequence[Json], drafter: str, kind: str) -> list[float]:
    """Share of drafts accepted at draft position 1, 2, ..., over all of a drafter's rows; `kind` is live or oracle."""
    counted = [row[kind]["by_position"] for row in rows if row["drafter"] == drafter and row[kind] is not None]
    longest = max((len(positions) for positions in counted), default=0)
    sums = [[sum(c[i][j] for c in counted if i < len(c)) for j in (0, 1)] for i in range(longest)]
    return [accepted / drafted for accepted, drafted in sums if drafted]
