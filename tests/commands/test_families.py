"""`shardmill families`: the families that build, and the configs there are for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardmill import cli
from shardmill.commands.pipeline import covers, list_families
from shardmill.models import FOLDERS, supported

ROOT = Path(__file__).parents[2]


def test_every_family_says_what_it_covers() -> None:
    """Its module's first line is "model_type X: what it covers"; without that the list would be empty there."""
    for kind in FOLDERS:
        for name in supported(kind):
            said = covers(name, kind)
            assert said and not said.startswith("model_type"), name


def test_configs_are_found_by_the_model_that_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the checkpoint's folder, by what was fetched, or by the shapes in resources; what is no config is unknown."""
    monkeypatch.chdir(tmp_path)
    places = {"here": "there", "fetched": "build/fetched/source", "shapes": "resources/shapes"}
    Path("configs").mkdir()
    for (name, folder), kind in zip(places.items(), ("llama", "qwen3", "llama"), strict=True):
        source = "{path: there}" if name == "here" else "{repo: a/b}"
        Path(f"configs/{name}.yaml").write_text(f"model: {name}\nsource: {source}\n")
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text(json.dumps({"model_type": kind}))
    Path("configs/other.yaml").write_text("model: other\nsource: {repo: a/b}\n")
    Path("configs/broken.yaml").write_text("model: [")
    families, unknown = list_families(Path("configs"))
    found = {family.model_type: family.configs for family in families}
    assert found["llama"] == ("configs/here.yaml", "configs/shapes.yaml")
    assert found["qwen3"] == ("configs/fetched.yaml",)
    assert found["phi3"] == ()
    assert unknown == ["configs/broken.yaml", "configs/other.yaml"]


def test_the_command_lists_them_for_people_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = json.loads(CliRunner().invoke(cli.app, ["families", "--json"]).stdout)
    for kind in FOLDERS:
        listed = [family["model_type"] for family in found["families"] if family["kind"] == kind]
        assert listed == list(supported(kind))
    (phi,) = [family for family in found["families"] if family["model_type"] == "phi3"]
    assert "Phi-4-mini" in phi["covers"]
    assert "configs/demo.yaml" in phi["configs"]
    said = CliRunner().invoke(cli.app, ["families"])
    assert said.exit_code == 0
    assert all(name in said.stdout for kind in FOLDERS for name in supported(kind))
