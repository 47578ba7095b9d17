"""The predicted cost of a tiny model: beside the gates, and apart from everything that they decide."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file

from shardmill import config, machine
from shardmill.files import read_json, write_json
from shardmill.pipeline import options
from shardmill.pipeline.needs import STEPS
from shardmill.pipeline.steps import predicted
from shardmill.pipeline.task import Artifact, Task


def described(built: tiny.Build, folder: Path, precisions: list[str]) -> Task:
    """The step's task for a tiny model, beside logits that are all equal."""
    write_json(folder / "plan.json", dict(built.plan))
    tokens = torch.arange(6)
    logits = torch.zeros(6, built.plan["architecture"]["vocab"])
    save_file({"tokens": tokens, "logits": logits}, folder / "reference.safetensors")
    states = Artifact(folder / "reference.safetensors", "r", {})
    bundles = [Artifact(path, name, {}) for name, path in built.packages.items()]
    table = Artifact(built.table, "t", {})
    return predicted.task(folder / "plan.json", states, bundles, table, precisions, {})


def test_the_file_has_fp16_and_each_precision(built: tiny.Build, tmp_path: Path) -> None:
    described(built, tmp_path, ["ane:tables", "ane"]).work({"costs": tmp_path / "predicted.json"})
    content = read_json(tmp_path / "predicted.json")
    assert content["tokens"] == 6
    assert [row["precision"] for row in content["costs"]] == ["fp16", "ane:tables", "ane"]
    divergences = [row["kl"] for row in content["costs"]]
    assert all(kl > 0 for kl in divergences) and len({*divergences}) == 3


def test_other_precisions_are_predicted_anew(built: tiny.Build, tmp_path: Path) -> None:
    one, other = (described(built, tmp_path, names).action for names in (["ane"], ["ane:tables"]))
    assert one is not None and other is not None and one.key != other.key


def test_without_the_key_a_build_has_no_such_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.hf_config().save_pretrained(tmp_path)
    plain = config.parse(json.loads(json.dumps(tiny.settings(str(tmp_path)))))
    asked = replace(plain, predict=("ane",))
    wanted = STEPS["predicted"].wanted
    assert wanted and wanted(asked) and not wanted(plain)
    assert options.split_settings(asked) == options.split_settings(plain)
    monkeypatch.setattr(machine, "is_portable", lambda: False)
    assert not wanted(asked)
