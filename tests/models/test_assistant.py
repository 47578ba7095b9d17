"""An assistant's parts as a plan has them, and assistants that are refused in one line each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import assistants
import pytest
import tiny
from safetensors.torch import load_file, save_file

from shardmill.config import parse
from shardmill.errors import ShardmillError
from shardmill.models.contract import states
from shardmill.models.part_kinds import inputs
from shardmill.pipeline.preview import preview


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's source, and beside it the assistant of that model."""
    made = tmp_path_factory.mktemp("model")
    checkpoint = assistants.write(assistants.target(), made / "checkpoint")
    assistants.write(assistants.assistant(), made / "assistant")
    tiny.fetched(checkpoint, made / "source")
    return made


def planned(folder: Path, drafter: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts and plan of the model with an assistant; `changes` go into the model's config."""
    (folder / "source/drafter").unlink(missing_ok=True)
    (folder / "source/drafter").symlink_to(drafter)
    settings = {"topology": "auto", "drafter": {"path": str(drafter)}, "program": assistants.STATE, **changes}
    return tiny.split(folder / "source", **settings)


def changed(folder: Path, into: Path, **changes: Any) -> Path:
    """A copy of the assistant with other values in config.json, of its layers if they have the field."""
    content = json.loads((folder / "assistant/config.json").read_text())
    for name, value in changes.items():
        (content["text_config"] if name in content["text_config"] else content)[name] = value
    into.mkdir()
    (into / "config.json").write_text(json.dumps(content))
    save_file(load_file(folder / "assistant/model.safetensors"), into / "model.safetensors")
    return into


def test_its_layers_read_the_caches_of_the_model_s_last_layers_that_have_one(folder: Path) -> None:
    parts, plan = planned(folder, folder / "assistant")
    assert plan["drafter"] | {"rope": {}} == {"kind": "assistant", "taps": [], "vocab": 8, "rope": {}, "lent": [3, 2]}
    layers = parts["draft_layers"]
    assert (layers.start, layers.end) == (8, 12) and not states(layers.spec)
    given = inputs(layers.spec)
    assert [*given][-4:] == ["k_3", "v_3", "k_2", "v_2"] and not any("write" in name for name in given)
    rows = {row["name"]: row for row in plan["parts"]}
    for name in ("k_2", "v_2", "k_3", "v_3"):
        assert rows["draft_layers"]["inputs"][name] == rows["layers_00_04"]["inputs"][name]
    assert "written" not in rows["draft_layers"]
    assert rows["draft_fuse"]["inputs"] == {"x": [1, 2 * 64 + 32, "T", 1]}
    assert parts["draft_head"].spec.graph.logit_cap == 0 and parts["head_0"].spec.graph.logit_cap == 3


def test_the_model_s_own_parts_are_those_of_a_build_without_it(folder: Path) -> None:
    parts, plan = planned(folder, folder / "assistant")
    plain, alone = tiny.split(folder / "source", topology="auto", program=assistants.STATE)
    assert plan["source"] == alone["source"]
    assert all(parts[name].content == part.content for name, part in plain.items())


def test_a_preview_counts_the_caches_that_a_draft_reads(folder: Path) -> None:
    changes = {"topology": "auto", "drafter": {"path": str(folder / "assistant")}, "program": assistants.STATE}
    found = preview(parse(tiny.settings(str(folder / "checkpoint"), **changes)))
    read = {program.name: program.lent_bytes for program in found.programs}
    parts, _ = planned(folder, folder / "assistant")
    lent = [shape for name, shape in inputs(parts["draft_layers"].spec).items() if name[:2] in ("k_", "v_")]
    assert {name for name, size in read.items() if size} == {"layers_04_08", "draft_layers"}  # which share
    assert read["draft_layers"] == sum(2 * shape[1] * shape[2] * shape[3] for shape in lent)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"backbone_hidden_size": 96}, "its backbone_hidden_size is 96, the model's 64: it is another"),
    "another vocabulary": ({"vocab_size": 16}, "its vocab_size is 16, the model's 8"),
    "another epsilon": ({"rms_norm_eps": 1e-6}, "its rms_norm_eps is 1e-06, the model's 0.001"),
    "another window": ({"sliding_window": 9}, "its sliding_window is 9, the model's"),
    "other heads": ({"head_dim": 16}, "its layer 0 reads a cache of 1 heads of 16 numbers"),
    "other arithmetic": ({"enable_moe_block": True}, "enable_moe_block is True: gemma4_text programs have no place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_assistant_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(ShardmillError, match=re.escape(said)):
        planned(folder, changed(folder, tmp_path / "assistant", **changes))


def test_caches_in_the_graph_are_refused_before_any_work(folder: Path) -> None:
    settings = {"topology": "auto", "drafter": {"path": str(folder / "assistant")}}
    with pytest.raises(ShardmillError, match=re.escape("write `program: {state: host}`")):
        preview(parse(tiny.settings(str(folder / "checkpoint"), **settings)))
    with pytest.raises(ShardmillError, match=re.escape("write `program: {state: host}`")):
        planned(folder, folder / "assistant", program={"state": "graph"})
