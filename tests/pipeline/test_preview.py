"""What `shardmill plan` says is what the steps then make: sizes, states, tensors, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny
from portable_coreml.judge import limits as of_systems

from shardmill import config
from shardmill.errors import ConfigError
from shardmill.forms.recipe import recipe
from shardmill.models.contract import states
from shardmill.pipeline.preview import preview

TEXTS = {"parity": {"text": "text.txt"}, "benchmark": {"text": "text.txt", "tasks": []}}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preview")
    tiny.write_checkpoint(folder / "checkpoint")
    (folder / "text.txt").write_text("a text")
    return folder


@pytest.fixture
def project(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which holds a checkpoint and a text."""
    monkeypatch.chdir(written)
    return written


def content(**changes: Any) -> dict[str, Any]:
    return tiny.settings("checkpoint", **TEXTS | changes)


def test_programs_are_those_that_split_makes(project: Path, tmp_path: Path) -> None:
    found = preview(config.parse(content()))
    parts, plan = tiny.split(tiny.fetched(project / "checkpoint", tmp_path / "source"))
    programs = {name: part for name, part in parts.items() if part.kind != "embedding"}
    assert [(p.name, p.start, p.end) for p in found.programs] == [
        (name, part.start, part.end) for name, part in programs.items()
    ]
    for p in found.programs:
        assert p.state_bytes == sum(2 * prod(shape) for shape in states(parts[p.name].spec).values())
        padding = p.weight_bytes - sum(recipe("int8").bytes_by_form(parts[p.name].shapes).values())
        assert 0 < padding < 200 * len(parts[p.name].shapes)  # records too
    assert found.programs[0].layers == {"attention": 2}
    assert found.table_bytes == 2 * tiny.VOCAB * tiny.HIDDEN
    assert found.state_bytes == 2 * 2 * tiny.LAYERS * tiny.CONTEXT * tiny.HEAD_DIM
    assert found.bytes_per_token == found.weight_bytes + found.state_bytes
    assert (found.tensors, found.refused) == ("match", ())
    assert {"bits_per_weight": found.bits_per_weight, "bytes_by_form": found.bytes_by_form} == plan["weights"]


@pytest.mark.usefixtures("project")
def test_what_is_left_open_is_shown_as_it_would_be_built() -> None:
    found = preview(config.parse(content(topology="auto", head={})))
    assert (found.topology, found.head_slices) == (((0, 4),), 1)
    assert [p.name for p in found.programs] == ["layers_00_04", "head_0"]


def test_tensors_that_differ_are_a_refusal(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They show in the headers, before anything is fetched or hashed."""
    monkeypatch.chdir(tmp_path)
    copy = tiny.copied_checkpoint(project / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "text.txt").write_text("a text")
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 96}))
    found = preview(config.parse(content()))
    assert found.tensors == "differ"
    assert len(found.refused) == 1
    assert "model.layers.0.mlp.down_proj.weight is [96, 128] instead of [96, 96]" in found.refused[0]


def test_every_refusal_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is too large, and a text that is not there; the table is shown all the same."""
    small = tuple(replace(limit, most=200_000) for limit in of_systems.WEIGHT_BYTES)
    monkeypatch.setattr(of_systems, "WEIGHT_BYTES", small)
    found = preview(config.parse(content(topology=[[0, 4]], parity={"text": "nowhere.txt"})))
    assert found.refused[0].startswith("topology: layers_00_04 holds")
    assert found.refused[0].endswith("[[0, 2], [2, 4]] fits")
    assert found.refused[1] == "parity.text: nowhere.txt is no file with text in it"
    assert [p.name for p in found.programs] == ["layers_00_04", "head_0", "head_1"]


@pytest.mark.usefixtures("project")
def test_the_config_of_another_model_has_no_preview() -> None:
    with pytest.raises(ConfigError, match="ends at layer 3, the model has 4"):
        preview(config.parse(content(topology=[[0, 3]])))


def test_of_a_repository_the_tensors_are_not_known(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmill.checkpoint.hub.download_config", lambda *_: project / "checkpoint" / "config.json")
    hub = {"repo": "a/b", "revision": "0" * 40}
    found = preview(config.parse(content(source=hub)))
    assert (found.tensors, found.refused, found.source) == ("unknown", (), f"a/b@{'0' * 40}")


@pytest.mark.usefixtures("project")
def test_adapters_cost_what_the_programs_inputs_take(tmp_path: Path) -> None:
    """The inputs are those of the plan that the build makes, and a model without the form has none."""
    program = {"shapes": "fixed", "adapters": 8}
    found = preview(config.parse(content(program=program)))
    _, plan = tiny.split(tiny.fetched(Path("checkpoint"), tmp_path / "source"), program=program)
    inputs = [part["inputs"][name] for part in plan["parts"] for name in part.get("adapters", ())]
    assert len(inputs) == 5 * len(tiny.TOPOLOGY)
    assert found.adapter_bytes == 2 * sum(map(prod, inputs)) == found.adapter_operations
    assert found.adapter_verdict == "no placement rule is against products with such inputs"
    bare = preview(config.parse(content(program={"shapes": "fixed"})))
    assert (bare.adapters, bare.adapter_bytes, bare.adapter_verdict) == (0, 0, "")
    assert bare.bytes_per_token == found.bytes_per_token


@pytest.mark.usefixtures("project")
def test_a_pass_reads_no_rows_of_labels() -> None:
    """Their program is planned beside the passes, within the limits of its few rows."""
    form = {"shapes": "fixed", "contexts": [32]}
    bare, found = (
        preview(config.parse(content(program=form | {"labels": words}))) for words in ([], ["None", " return"])
    )
    (own,) = (program for program in found.programs if program.name == "labels")
    assert (own.kind, own.end, own.parameters) == ("labels", 16, 17 * tiny.HIDDEN)
    same = ("bytes_per_token", "bits_per_weight", "bytes_by_form", "state_bytes", "lengths")
    assert all(getattr(found, name) == getattr(bare, name) for name in same)
    assert found.weight_bytes == bare.weight_bytes + own.weight_bytes


@pytest.mark.usefixtures("project")
def test_what_the_rules_are_against_is_said() -> None:
    settings = json.loads(Path("checkpoint/config.json").read_text())
    Path("wide").mkdir(exist_ok=True)
    Path("wide/config.json").write_text(json.dumps(settings | {"intermediate_size": 16400}))
    program = {"shapes": "fixed", "adapters": 8}
    found = preview(config.parse(content(program=program) | {"source": {"path": "wide"}}))
    assert found.adapter_verdict == "an axis of 16400 is too long for chips before M4 (rule S4)"
