"""The context lengths that a program has functions for, with the functions and caches at each length.

A text begins in a short cache and moves to a longer one, so that its first tokens do not pay for empty slots. The
weights are the same, and so are all results: the mask hides empty slots.
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
    """A program in a context of a given number of slots.

    Attributes:
        functions: the functions that run its passes.
        kept: the shapes of the states, or of the host's caches.
    """

    functions: Functions
    kept: Shapes


NONE: Mapping[int, Length] = {}  # for a program whose passes all use the same functions


def lengths_by_entry(part: Mapping[str, Any], context: int) -> dict[int, Length]:
    """Return the lengths of a part's entry in model.json, by slots, ascending.

    The result is empty if all passes use the same functions.

    Args:
        part: the part's entry.
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
    """Return the lengths of a part according to the graph contract, by slots, ascending.

    Args:
        blueprints: the part's blueprint at each length, the whole context last.
        calls: the part's functions.
    """
    whole = of_blueprint(blueprints[max(blueprints)], calls)
    if whole is None or not calls.contexts:
        return {}
    return {
        slots: Length(Functions(calls.shorter.get(slots, whole.names), whole.axes), caches(blueprint))
        for slots, blueprint in blueprints.items()
    }
