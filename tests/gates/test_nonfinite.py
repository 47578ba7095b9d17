"""A gate that turns NaN says at which operation of which layer, whatever came of it afterwards."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from shardmill.errors import GateError
from shardmill.gates.measurement import Measurement
from shardmill.gates.nonfinite import explained
from shardmill.runtime import engine, kv
from shardmill.runtime.manifest import in_place

from . import judged

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="Core ML does not show what its operations make")
SPOILT = 5  # the position from which on something is no number


def rotate_by(patch: pytest.MonkeyPatch, value: float) -> None:
    """Puts a value into the cosines of one position, which the first rotation of every layer takes."""
    real = kv.rope_tables

    def spoilt(*arguments: Any) -> Any:
        cos, sin = real(*arguments)
        cos[SPOILT] = value
        return cos, sin

    patch.setattr(kv, "rope_tables", spoilt)


@pytest.mark.parametrize("name", ["layers_02_03", "layers_00_02", "stack"])
def test_the_first_operation_and_its_place_are_named(
    built: tiny.Build, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not one after it, nor one that met what an earlier pass left in a state. All layers share the rotary rows."""
    rotate_by(monkeypatch, float("nan"))
    with pytest.raises(GateError) as error:
        judged.whole(built) if name == "stack" else judged.part(built, name)
    said, program = str(error.value), "layers_00_02" if name == "stack" else name
    found = re.search(r"first non-finite: transpose output shared_transpose_[a-p]+ \(\w+, outside layers\)", said)
    assert found
    first = found.group()
    assert f"({program}, outside layers)" in first
    assert f"program_error is nan, must be <= 0.0001 ({first})" in said
    assert re.search(rf"width_error is nan, must be <= \S+ \(T=2; {re.escape(first)}\)", said)
    assert said.count(first) == said.count("first non-finite") > 5


def test_what_overflows_in_fp16_alone_is_named(built: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the figures of the shipped precision, and of no other: the rest are numbers, if wrong ones."""
    rotate_by(monkeypatch, 6e4)
    with pytest.raises(GateError) as error:
        judged.part(built, "layers_02_03")
    said = str(error.value)
    assert said.count("first non-finite") == 1
    assert re.search(r"psnr is nan, must be >= 30 \(first non-finite: mul output \S+ \(layer 2\)\)", said)


def test_a_number_costs_no_second_run(built: tiny.Build) -> None:
    def rerun() -> None:
        raise AssertionError

    fine = Measurement("kl", 1e9)
    assert explained(fine, rerun, built.packages["head_0"]) is fine


def test_a_program_without_a_fault_is_not_blamed(built: tiny.Build) -> None:
    """Where it is the reference that turned NaN."""
    found = explained(Measurement("kl", np.nan, "on a text"), lambda: None, built.packages["head_0"])
    assert found.detail == "on a text; every operation's results are finite"


def test_the_engine_is_watched_no_longer_afterwards(built: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the measurements that follow would end at the same operation."""
    rotate_by(monkeypatch, float("nan"))
    loaded = engine.Engine(in_place(built.plan, built.packages, built.table), Path("/"))

    def rerun() -> object:
        return loaded.forward([1], [SPOILT], [SPOILT])

    assert "layers_00_02" in explained(Measurement("kl", np.nan), rerun, loaded).detail
    rerun()
    assert loaded.programs[0].around is nullcontext
