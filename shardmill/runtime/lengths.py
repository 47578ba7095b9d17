"""The lengths of context that a program has functions for: what is called and what is kept at each.

A text begins in a short cache and goes on in a longer one, so that its first tokens do not pay for slots that nobody
has filled. The weights are the same, and so are all results: a slot that holds nothing is hidden by its mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardmill.models.calls import Calls
from shardmill.models.contract import Blueprint, caches
from shardmill.runtime.functions import Functions, of_blueprint, of_entry

Shapes = Mapping[str, tuple[int, ...]]  # by name


@dataclass(frozen=True)
class Length:
    """A program in a context of so many slots.

    Attributes:
        functions: those that take its passes.
        kept: the shapes of what is kept from pass to pass, states or caches of the host.
    """

    functions: Functions
    kept: Shapes


NONE: Mapping[int, Length] = {}  # of a program whose passes all take the same functions


def lengths_by_entry(part: Mapping[str, Any], context: int) -> dict[int, Length]:
    """Those of a part as model.json has it, by their slots, ascending; none where all passes take the same functions.

    Args:
        part: its entry.
        context: slots of the whole context.
    """
    whole, found = of_entry(part), {}
    if whole is None or "contexts" not in part:
        return {}
    for slots, shorter in (*part["contexts"].items(), (context, {"functions": part["functions"]})):
        shapes = {key: {**part[key], **shorter.get(key, {})} for key in ("inputs", "states")}
        kept = {name: shapes["inputs"][name] for name in part["written"]} if "written" in part else shapes["states"]
        names = {int(width): str(name) for width, name in shorter["functions"].items()}
        found[int(slots)] = Length(Functions(names, whole.axes), {n: tuple(map(int, s)) for n, s in kept.items()})
    return found


def lengths_by_blueprint(blueprints: Mapping[int, Blueprint], calls: Calls) -> dict[int, Length]:
    """Those of a part by what the graph contract says of it.

    Args:
        blueprints: of the part at each length, the whole context last.
        calls: how it is called.
    """
    whole = of_blueprint(blueprints[max(blueprints)], calls)
    if whole is None or not calls.contexts:
        return {}
    return {
        slots: Length(Functions(calls.shorter.get(slots, whole.names), whole.axes), caches(blueprint))
        for slots, blueprint in blueprints.items()
    }
