"""What Core ML is told of programs of flexible shapes while they are loaded, and of no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import pytest
import tiny

from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place
from shardmill.runtime.program import Program

Told = list[dict[str, Any]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What each model is loaded with, beside its path and compute units; none is loaded."""
    found: Told = []

    class Model:
        def __init__(self, path: str, compute_units: ct.ComputeUnit, **named: Any) -> None:
            found.append(named)

        def make_state(self) -> None:
            """None."""

    monkeypatch.setattr(ct.models, "MLModel", Model)
    return found


def load(build: tiny.Build, functions: dict[str, str], **changes: Any) -> None:
    manifest = in_place(build.plan, build.packages, build.table)
    parts = [{**part, "functions": functions} if functions else part for part in manifest["parts"]]
    Engine({**manifest, "parts": parts, **changes}, Path("/"))


@pytest.mark.parametrize("frequency", ["infrequent", "frequent"])
@pytest.mark.parametrize("functions", [{}, {"1": "", "4": ""}], ids=["range", "enumerated"])
def test_programs_of_flexible_shapes_have_the_hint(
    built: tiny.Build, told: Told, frequency: str, functions: dict[str, str]
) -> None:
    load(built, functions, reshape_frequency=frequency)
    hint = {"reshapeFrequency": ct.ReshapeFrequency[frequency.capitalize()]}
    assert told == [{"optimization_hints": hint}] * len(built.packages)


def test_programs_of_fixed_shapes_have_none(built: tiny.Build, told: Told) -> None:
    """Neither those that have a function for each width, nor an encoder's, which have one shape."""
    load(built, {"1": "t1", "4": "t4"}, reshape_frequency="frequent")
    assert told == [{"function_name": "t1"}, {"function_name": "t4"}] * len(built.packages)
    told.clear()
    Program(built.packages["head_0"], stateful=False)
    assert told == [{}]
