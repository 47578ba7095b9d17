"""The forecast finds the numbers that passes were made up from, and is never taken for a measurement."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardmill.cli import app
from shardmill.device.forecast import Costs, Work, fitted, forecast, work_of
from shardmill.device.kit import described
from shardmill.errors import ShardmillError
from shardmill.files import load_json, sealed, write_json

from .lane import lines, measured

TRUTH = Costs(byte=1e-8, operation=1e-10, dispatch=0.25)
WORKS = [Work(b, o, d) for b in (1e8, 1e9) for o in (1e8, 1e11) for d in (1, 30)]


def test_known_costs_are_found_again() -> None:
    found = fitted([(work, TRUTH.ms(work)) for work in WORKS])
    assert found.byte == pytest.approx(TRUTH.byte) and found.operation == pytest.approx(TRUTH.operation)
    assert found.dispatch == pytest.approx(TRUTH.dispatch)


def test_no_cost_is_negative() -> None:
    """A wide pass that is faster than a narrow one would else make operations a gain."""
    found = fitted([(Work(1e9, 1e9, 2), 20.0), (Work(1e9, 4e9, 2), 19.0), (Work(2e9, 1e9, 2), 40.0)])
    assert found.operation == 0 and found.byte > 0 and found.dispatch >= 0


def test_too_few_passes_are_refused() -> None:
    with pytest.raises(ShardmillError, match="needs 3 measured passes"):
        fitted([(WORKS[0], 1.0), (WORKS[1], 2.0)])


def test_the_work_of_a_pass_is_counted_from_the_build(build: Path) -> None:
    """Two layers of width 96 with three query heads and a key/value head of 32, FFN 128, and a head of 256 rows."""
    form = described(build, load_json(build / "model.json"))
    layer = 96 * (3 + 2) * 32 + 96 * 96 + 3 * 96 * 128
    states = 2 * 2 * 64 * 32
    assert form["parameters"] == 2 * layer + 256 * 96
    assert form["state_bytes"] == 2 * states
    assert form["weights_bytes"] == pytest.approx(form["parameters"], rel=0.1)  # INT8, scales and norms
    work = work_of(form, 4)
    assert work == Work(form["weights_bytes"] + 2 * states, 8 * (form["parameters"] + states), 2)
    narrow = work_of({**form, "kind": "encoder", "state_bytes": 0, "programs": 2}, 4)
    assert narrow.dispatches == 1 and narrow.bytes == form["weights_bytes"] / 2


def as_measured(kit: Path, build: Path, ms: dict[int, float], chip: str = "Apple M4 Max") -> None:
    """Puts a result beside the build as if a Mac had given it."""
    content: dict[str, Any] = load_json(kit / "result.json")
    content["engine"], content["machine"]["chip"] = {"name": "coreml"}, chip
    for width, value in ms.items():
        lines(content)[f"pass.T={width}"]["timing"]["ms"] = value
    write_json(build / f"evidence/{chip}.json", sealed(content))


def test_a_build_that_was_not_measured_gets_a_forecast_and_nothing_else(kit: Path, build: Path, tmp_path: Path) -> None:
    measured(kit)
    first, second = (Path(shutil.copytree(build, tmp_path / name)) for name in ("first", "second"))
    as_measured(kit, first, {1: 10.0, 4: 12.0})
    with pytest.raises(ShardmillError, match=r"^Apple M4 Max, .*: a forecast needs 3 .*, there are 2$"):
        forecast([first])
    as_measured(kit, second, {1: 10.0, 4: 12.0})
    third = Path(shutil.copytree(build, tmp_path / "third"))
    rows = forecast([first, second, third])
    assert [(Path(row["build"]).name, row["width"], row["measured_ms"]) for row in rows] == [
        ("first", 1, 10.0),
        ("first", 4, 12.0),
        ("second", 1, 10.0),
        ("second", 4, 12.0),
        ("third", 1, None),
        ("third", 4, None),
    ]
    assert [row["forecast_ms"] for row in rows] == pytest.approx([10.0, 12.0] * 3)
    said = CliRunner().invoke(app, ["device", "forecast", str(first), str(second), str(third)]).stdout
    assert "third at T=4: forecast 12.00 ms, not measured" in said
    assert "first at T=1: forecast 10.00 ms, measured 10.00 ms (" in said


def test_a_build_that_routes_to_experts_gets_no_forecast(kit: Path, build: Path, tmp_path: Path) -> None:
    """All of its experts would count, of which a pass calls a few."""
    measured(kit)
    first, second, third = (Path(shutil.copytree(build, tmp_path / name)) for name in ("first", "second", "third"))
    for one in (first, second):
        as_measured(kit, one, {1: 10.0, 4: 12.0})
    manifest = load_json(third / "model.json")
    experts = {"name": "experts_00_0", "kind": "experts", "inputs": {"x": [1, 96, "T", 1], "weights": [1, 2, "T", 1]}}
    manifest["parts"].insert(1, manifest["parts"][0] | experts | {"states": {}})
    write_json(third / "model.json", manifest)
    rows = forecast([first, second, third])
    assert [row["forecast_ms"] is None for row in rows] == [Path(row["build"]).name == "third" for row in rows]
    said = CliRunner().invoke(app, ["device", "forecast", str(first), str(second), str(third)])
    assert said.exit_code == 0 and "third at T=4: no forecast, its tokens decide" in said.stdout


def test_a_chip_that_was_measured_too_little_keeps_no_other_from_its_forecast(
    kit: Path, build: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured(kit)
    first, second = (Path(shutil.copytree(build, tmp_path / name)) for name in ("first", "second"))
    for one in (first, second):
        as_measured(kit, one, {1: 10.0, 4: 12.0})
    as_measured(kit, first, {1: 20.0, 4: 24.0}, chip="Apple M1")
    rows = forecast([first, second])
    assert {row["system"].partition(",")[0] for row in rows} == {"Apple M4 Max"} and len(rows) == 4
    assert "left out: Apple M1," in caplog.text and "there are 2" in caplog.text
