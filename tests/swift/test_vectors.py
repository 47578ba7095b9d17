"""The cases that the Swift tests read are those that the Python runtime gives today."""

import json
import math
from typing import Any

import limits
import pytest

from .programs import script

NEAR = limits.roundings("fp32", 4).value  # rotary rows and margins: a cosine is another by a rounding elsewhere

writer = script("write_vectors")


@pytest.mark.parametrize("name", writer.WRITERS)
def test_recorded_vectors_are_those_of_today(name: str) -> None:
    recorded = json.loads((writer.VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    today = json.loads(json.dumps(list(writer.WRITERS[name]())))
    assert leaves(today).keys() == leaves(recorded).keys()
    expected = leaves(recorded)
    other = {place: value for place, value in leaves(today).items() if not near(value, expected[place])}
    assert other == {}


def near(value: Any, recorded: Any) -> bool:
    """Return whether two leaves are equal, numbers but for a rounding."""
    if isinstance(value, float) and isinstance(recorded, float):
        return math.isclose(value, recorded, rel_tol=NEAR, abs_tol=NEAR)
    return bool(value == recorded)


def leaves(value: Any) -> dict[str, Any]:
    """Return the numbers and texts of parsed JSON by their places."""
    found: dict[str, Any] = {}

    def visit(place: str, value: Any) -> None:
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            found[f"{place}#"] = len(value)
            for key, item in items:
                visit(f"{place}/{key}", item)
        else:
            found[place] = value

    visit("", value)
    return found
