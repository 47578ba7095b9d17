"""What the files of sentence-transformers say is read in both spellings, and what no host computes is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from models import tiny_encoders
from torch import nn

from shardmill.checkpoint.modules import Dense, Modules, read_modules
from shardmill.errors import CheckpointError
from shardmill.files import write_json


def written(folder: Path, pooling: str = "mean") -> Path:
    """A folder with pooling, two projections and prompts."""
    tiny_encoders.write_modules(folder, pooling, [nn.Linear(96, 64), nn.Linear(64, 8, bias=False)])
    return folder


def change(file: Path, **changes: Any) -> None:
    """Write other values of keys; None takes a key away."""
    content = json.loads(file.read_text()) | changes
    write_json(file, {key: value for key, value in content.items() if value is not None})


def test_a_checkpoint_without_modules_says_nothing(tmp_path: Path) -> None:
    assert read_modules(tmp_path, 96) == Modules()


def test_modules_are_read_in_order(tmp_path: Path) -> None:
    found = read_modules(written(tmp_path), 96)
    dense = Dense("2_Dense/model.safetensors", "tanh", 64), Dense("3_Dense/model.safetensors", "identity", 8)
    assert found == Modules("mean", dense, tiny_encoders.PROMPTS, None)
    change(tmp_path / "config_sentence_transformers.json", default_prompt_name="query")
    assert read_modules(tmp_path, 96).prompt == "query"


@pytest.mark.parametrize(("name", "own"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")])
def test_both_spellings_of_a_pooling_are_read(tmp_path: Path, name: str, own: str) -> None:
    assert read_modules(written(tmp_path, name), 96).pooling == own
    write_json(tmp_path / "1_Pooling/config.json", {"embedding_dimension": 96, "pooling_mode": name})
    assert read_modules(tmp_path, 96).pooling == own


POOLING, FIRST, PROMPTS = "1_Pooling/config.json", "2_Dense/config.json", "config_sentence_transformers.json"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another pooling": (POOLING, {"pooling_mode": "max"}, "the pooling is max"),
    "two poolings": (POOLING, {"pooling_mode_cls_token": True}, "the pooling is cls and mean"),
    "prompts that are not pooled": (POOLING, {"include_prompt": False}, "include_prompt is false"),
    "another activation": (FIRST, {"activation_function": "torch.nn.modules.activation.GELU"}, "activation.GELU"),
    "a residual": (FIRST, {"use_residual": True}, "only a plain projection"),
    "tokens that are projected": (FIRST, {"module_input_name": "token_embeddings"}, "only a plain projection"),
    "another width": (FIRST, {"out_features": 95}, "instead of"),
    "a bias that is not there": ("3_Dense/config.json", {"bias": True}, "instead of"),
    "no prompt of the default's name": (PROMPTS, {"default_prompt_name": "passage"}, "default_prompt_name 'passage'"),
    "a prompt that is no text": (PROMPTS, {"prompts": {"query": 5}}, "`prompts` are not texts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_host_computes_is_refused_by_its_file(tmp_path: Path, name: str) -> None:
    file, changes, message = REFUSED[name]
    change(written(tmp_path) / file, **changes)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_modules(tmp_path, 96)


@pytest.mark.parametrize("kinds", [["Transformer"], ["Transformer", "Pooling", "Normalize", "Dense"], ["Router"]])
def test_other_chains_are_refused(tmp_path: Path, kinds: list[str]) -> None:
    listed = [{"path": "", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    write_json(written(tmp_path) / "modules.json", listed)
    with pytest.raises(CheckpointError, match=f"names {', '.join(kinds)}; an embedding is made by"):
        read_modules(tmp_path, 96)


@pytest.mark.parametrize("damage", ["{", "5", "[5]", '[{"path": "../..", "type": "a.Transformer"}]'])
def test_a_damaged_list_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    (tmp_path / "modules.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"modules\.json") as refused:
        read_modules(tmp_path, 96)
    assert "\n" not in str(refused.value)


def test_a_projection_in_a_pickle_is_refused(tmp_path: Path) -> None:
    (written(tmp_path) / "2_Dense/model.safetensors").rename(tmp_path / "2_Dense/pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"2_Dense/model\.safetensors: missing"):
        read_modules(tmp_path, 96)


def test_modules_are_fetched_with_their_model(tmp_path: Path) -> None:
    """And read again from where the build keeps them."""
    checkpoint = tiny_encoders.write_tiny("gemma3_text", tmp_path / "ck")
    written(checkpoint)
    (checkpoint / "onnx").mkdir()
    (checkpoint / "onnx/config.json").write_text("{}")
    kept = tiny.fetched(checkpoint, tmp_path / "source")
    files = json.loads((kept / "source.json").read_text())["files"]
    modules = {
        "1_Pooling/config.json",
        *(f"{n}_Dense/{f}" for n in (2, 3) for f in ("config.json", "model.safetensors")),
    }
    assert {name for name in files if "/" in name} == modules
    assert read_modules(kept, 96) == read_modules(checkpoint, 96)
