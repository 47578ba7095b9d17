"""Questions about a system that a kit asks before it measures builds, and their answers in words.

A question is data in kit.json: its name, its text, what its answer decides, and probes, which `probes.py` makes and
runs. A probe's line has the key questions/NAME/probe#PLACE. The questions come in the order of what their answers would
change, and after twenty minutes no further probe begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kit_runner.kit import ASKED, NOT_RUN, OK, Record

SECONDS = 1200.0  # after which no further probe begins
FASTER = 0.8  # of the CPU's time; on the CPU a program takes its whole time


def key(name: str, place: int) -> str:
    """Return the key of a probe's line."""
    return f"{ASKED}/{name}/probe#{place}"


def answers(questions: Sequence[Mapping[str, Any]], lines: Mapping[str, Record]) -> Iterator[str]:
    """Yield a line of text for each question, from the lines of its probes."""
    for question in questions:
        pairs = [(probe, lines.get(key(question["name"], i))) for i, probe in enumerate(question["probes"])]
        known = [(probe, line) for probe, line in pairs if line is not None and line["status"] != NOT_RUN]
        said = _compared(known) if question["compares"] else _sorted_out(known)
        left = [probe["name"] for probe, line in pairs if line is None or line["status"] == NOT_RUN]
        parts = [said, f"not run: {', '.join(left)}" if left else ""]
        yield f"{question['text']} {'; '.join(filter(None, parts))}"


def _sorted_out(known: Sequence[tuple[Mapping[str, Any], Record]]) -> str:
    """Return which probes ran on the Neural Engine, and which elsewhere, wrongly or not at all."""
    groups: dict[str, list[str]] = {}
    for probe, line in known:
        groups.setdefault(_fate(line), []).append(probe["name"])
    return "; ".join(f"{fate}: {', '.join(names)}" for fate, names in groups.items())


def _fate(line: Record) -> str:
    if line["status"] != OK:
        return "wrong" if line["status"] == "wrong" else "no result"
    value = line["value"]
    if value["evidence"] != "measured":
        return "right here, without a Neural Engine"
    if value["placed"] < value["of"]:
        return "right, but not all on the Neural Engine"
    return "on the Neural Engine" if on_engine(line) else "on the Neural Engine by its plan, but as slow as the CPU"


def on_engine(line: Record) -> bool:
    """Return whether a probe ran on the Neural Engine: by its plan, and faster than on the CPU if that was measured."""
    value, timing = line["value"], line["timing"]
    placed = line["status"] == OK and value["placed"] == value["of"]
    return bool(placed and timing["ms"] < FASTER * timing.get("ms_cpu", float("inf")))


def _compared(known: Sequence[tuple[Mapping[str, Any], Record]]) -> str:
    """Return the time of each probe beside the time of the first of its group."""
    first: dict[str, float] = {}
    said = []
    for probe, line in known:
        if line["status"] != OK:
            said.append(f"{probe['name']}: {line['status']}")
            continue
        ms = float(line["timing"]["ms"])
        if probe["group"] not in first:
            first[probe["group"]] = ms
            said.append(f"{probe['name']} {ms:.3g} ms")
        else:
            said.append(f"{probe['name']} {ms:.3g} ms, {first[probe['group']] / ms:.2f} times as fast")
    return "; ".join(said)
