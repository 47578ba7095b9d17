"""Ways to cut a model follow from what a pass reads and calls, and none is offered that could not be built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import yaml
from models import tiny_encoders, tiny_families
from typer.testing import CliRunner

from shardmill import config
from shardmill.cli import app
from shardmill.device import ways as module
from shardmill.device.forecast import Costs
from shardmill.device.ways import Way, ways
from shardmill.errors import ConfigError
from shardmill.pipeline import preview
from shardmill.pipeline.resolve import workflow_root

TRUTH = Costs(byte=1e-6, operation=1e-9, dispatch=0.25)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of a model of six layers; costs are those of one system."""
    monkeypatch.chdir(tmp_path)
    tiny.write_checkpoint(tmp_path / "checkpoint", layers=6)
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(tiny.settings("checkpoint", topology=[[0, 5], [5, 6]])))
    monkeypatch.setattr(module, "costs_by_system", lambda builds: {"Mac": TRUTH} if builds else {})
    return tmp_path / "model.yaml"


def found(model: Path) -> list[Way]:
    return ways(config.load(model), [Path("build/a")])["Mac"]


def test_what_calls_least_comes_first_and_the_configs_own_cut_is_among_them(model: Path) -> None:
    every = found(model)
    assert [way.ms[1] for way in every] == sorted(way.ms[1] for way in every)
    assert (every[0].topology, every[0].slices, every[0].programs) == (((0, 6),), 1, 2)
    assert ((0, 5), (5, 6)) in {way.topology for way in every}
    assert ((0, 1), (1, 3), (3, 4), (4, 6)) in {way.topology for way in every}
    for way in every:
        assert way.programs == len(way.topology) + way.slices and way.topology[-1][1] == 6


def test_a_way_costs_what_its_bytes_operations_and_calls_do(model: Path) -> None:
    known = preview.preview(config.load(model))
    (way,) = [w for w in found(model) if (w.topology, w.slices) == (known.topology, known.head_slices)]
    numbers = sum(program.parameters for program in known.programs)
    for width in module.WIDTHS:
        operations = 2 * width * (numbers + known.state_bytes / 2)
        expected = 1e-6 * known.bytes_per_token + 1e-9 * operations + 0.25 * len(known.programs)
        assert way.ms[width] == pytest.approx(expected)
    assert way.pays_from(8) == pytest.approx(way.ms[8] / way.ms[1]) and way.pays_from(1) == 1


def test_programs_over_the_limit_are_left_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = min(way.largest for way in found(model))
    assert any(way.largest > 2 * least for way in found(model))
    monkeypatch.setattr(preview, "MAX_WEIGHT_BYTES", 2 * least)
    assert {way.largest for way in found(model)} == {
        size for size in {w.largest for w in found(model)} if size <= 2 * least
    }


def test_an_encoder_has_no_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_encoders.tiny_model("bert").save_pretrained(tmp_path / "checkpoint")
    settings = {"model": "e", "source": {"path": "checkpoint"}, "buckets": [32]}
    with pytest.raises(ConfigError, match="no cuts to choose"):
        ways(config.parse(settings), [])


def test_a_cut_of_experts_that_the_host_routes_to_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups of all layers were counted as called."""
    monkeypatch.chdir(tmp_path)
    tiny_families.tiny_model("granitemoe").save_pretrained(tmp_path / "checkpoint")
    settings = {"model": "m", "source": {"path": "checkpoint"}, "context": 64, "experts": 4}
    with pytest.raises(ConfigError, match=r"m: its tokens decide which groups of experts.*`experts: dense`"):
        ways(config.parse(settings), [])
    assert ways(config.parse(settings | {"experts": "dense"}), []) == {}


def test_files_are_found_beside_the_workflow_as_in_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["device", "ways", str(workflow_root() / "configs/demo.yaml")])
    assert (told.exit_code, "nothing was measured" in told.stdout) == (0, True), told.output


def test_on_the_command_line(model: Path) -> None:
    told = CliRunner().invoke(app, ["device", "ways", str(model), "build/a", "--most", "2"])
    assert told.exit_code == 0 and "a forecast" in told.stdout and "T=8" in told.stdout, told.output
    told = CliRunner().invoke(app, ["device", "ways", str(model), "build/a", "--json"])
    assert len(json.loads(told.stdout)["Mac"]) == len(found(model))
    told = CliRunner().invoke(app, ["device", "ways", str(model)])
    assert "nothing was measured" in told.stdout
