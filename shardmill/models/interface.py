"""What plan.json and model.json say of how a program is called."""

from __future__ import annotations

from typing import Any

from shardmill.models.calls import Calls
from shardmill.models.contract import Form, T, caches, inputs, new_name, output, states


def interface(form: Form, calls: Calls) -> dict[str, Any]:
    """What goes into a part's program, what it keeps and what comes out; "T" stands for the token axis."""
    named = {name: ["T" if extent == T else extent for extent in shape] for name, shape in inputs(form).items()}
    found = {"inputs": named, "states": {name: list(s) for name, s in states(form).items()}, "output": output(form)}
    if form.hosted:
        found["written"] = {name: new_name(name) for name in caches(form)}
    return found | ({"functions": functions} if (functions := calls.named) else {})
