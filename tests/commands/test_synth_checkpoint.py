"""`shardmill synth-checkpoint` on a command line: what it is given and can't use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardmill import cli
from shardmill.pipeline.resolve import workflow_root

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("config", "shapes", "expected"),
    [
        ("- demo", {}, "no config of a model"),
        ("model: m\nsource: shapes", {}, "no config of a model"),
        ("model: m\nsource: {path: shapes}", [], "not a model's config"),
        ("model: m\nsource: {path: shapes}", SIZES | {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ],
)
def test_what_says_no_shapes_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, shapes: Any, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("like.yaml").write_text(config)
    Path("shapes").mkdir()
    Path("shapes/config.json").write_text(json.dumps(shapes))
    said = CliRunner().invoke(cli.app, ["synth-checkpoint", "made", "--like", "like.yaml"])
    assert said.exit_code == 1
    assert said.stderr.startswith("shardmill: ") and said.stderr.count("\n") == 1
    assert expected in said.stderr and "unexpected" not in said.stderr
    assert not Path("made").exists()


@pytest.mark.parametrize("source", ["{path: resources/demo}", "{repo: a/b, revision: main}"])
def test_what_the_workflow_has_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("like.yaml").write_text(f"model: demo\nsource: {source}")
    said = CliRunner().invoke(cli.app, ["synth-checkpoint", "made", "--like", "like.yaml", "--layers", "1"])
    assert said.exit_code == 0, said.output
    assert json.loads(Path("made/config.json").read_text())["num_hidden_layers"] == 1
    assert Path("made/tokenizer.json").read_bytes() == (workflow_root() / "resources/demo/tokenizer.json").read_bytes()


def test_transformers_warns_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rope_parameters that it computes with as every other."""
    from transformers.utils import logging

    asked: list[int] = []

    def write(shapes: Any, folder: Path, seed: int, tokenizer: Path) -> None:
        asked.append(logging.get_verbosity())
        folder.mkdir()

    monkeypatch.setattr("shardmill_lab.synthetic.write_synthetic_checkpoint", write)
    like = workflow_root() / "configs/demo.yaml"
    said = CliRunner().invoke(cli.app, ["synth-checkpoint", str(tmp_path / "made"), "--like", str(like)])
    assert (said.exit_code, asked) == (0, [logging.ERROR])


def test_a_negative_seed_is_a_wrong_command_line(tmp_path: Path) -> None:
    (tmp_path / "like.yaml").write_text("model: m")
    said = CliRunner().invoke(cli.app, ["synth-checkpoint", "m", "--like", str(tmp_path / "like.yaml"), "--seed", "-1"])
    assert said.exit_code == 2
