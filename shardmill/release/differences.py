"""Why two builds' bytes differ: by their receipts, the first steps that differ and the ingredients of their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmill.pipeline.ingredients import differences

Steps = Mapping[str, Mapping[str, Any]]
INGREDIENTS = ("inputs", "params", "code", "packages")  # of a step's key


def subject_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Names of subjects that two statements do not share, byte for byte."""
    sets = [{(row["name"], row["digest"]["sha256"]) for row in one["subject"]} for one in (ours, theirs)]
    return sorted({name for name, _ in sets[0] ^ sets[1]})


def steps_of(statement: Mapping[str, Any]) -> Steps:
    """The receipts in provenance, by name."""
    found: Steps = statement["predicate"]["buildDefinition"]["internalParameters"]["steps"]
    return found


def explained(ours: Steps, theirs: Steps) -> list[str]:
    """A line for each step whose result differs and is not explained by another's: which, and why."""
    changed = {name for name in {*ours, *theirs} if _outputs(ours, name) != _outputs(theirs, name)}
    lines = []
    for name in sorted(changed):
        if name not in ours or name not in theirs:
            lines.append(f"{name}: only one build has this step")
            continue
        one, other = ({key: steps[name].get(key) for key in INGREDIENTS} for steps in (ours, theirs))
        found = differences(one, other)
        own = [key for key in found if not key.startswith("inputs.")]
        if own:
            lines.append(f"{name}: {', '.join(own)} differ")
        elif not found:
            lines.append(f"{name}: other bytes by the same key: another kind of processor, perhaps")
        else:
            lines.append(f"{name}: other inputs ({', '.join(key.removeprefix('inputs.') for key in found)})")
    return sorted(lines, key=lambda line: ("other inputs" in line, line))  # what only follows comes last


def _outputs(steps: Steps, name: str) -> Any:
    return steps.get(name, {}).get("outputs")
