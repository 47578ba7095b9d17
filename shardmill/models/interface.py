"""What plan.json and model.json say of how a program is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardmill.models.calls import Calls
from shardmill.models.contract import Blueprint, T, caches, inputs, new_name, output, states


def interface(blueprint: Blueprint, calls: Calls) -> dict[str, Any]:
    """What goes into a part's program, what it keeps and what comes out; "T" stands for the token axis."""
    named = {name: ["T" if extent == T else extent for extent in shape] for name, shape in inputs(blueprint).items()}
    found = {
        "inputs": named,
        "states": {name: list(s) for name, s in states(blueprint).items()},
        "output": output(blueprint),
    }
    if blueprint.hosted:
        found["written"] = {name: new_name(name) for name in caches(blueprint)}
    if functions := calls.named:
        found["functions"] = functions
    if calls.contexts:
        found["contexts"] = {str(slots): _shorter(blueprint, calls, slots) for slots in calls.contexts}
    return found


def _shorter(blueprint: Blueprint, calls: Calls, slots: int) -> dict[str, Any]:
    """The functions for a shorter context, and the inputs and states that have other shapes there."""
    whole = interface(blueprint, replace(calls, contexts=()))
    other = interface(replace(blueprint, slots=slots), Calls())
    shapes = {
        key: {name: shape for name, shape in other[key].items() if shape != whole[key][name]}
        for key in ("inputs", "states")
    }
    return {"functions": {str(width): name for width, name in calls.shorter[slots].items()}, **shapes}
