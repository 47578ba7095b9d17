"""A checkpoint's config.json: what of it no model can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.errors import CheckpointError
from shardmill.models.hf_config import SIZES, config_problems, load_hf_config, size_fault, text_part

SOUND: dict[str, Any] = {"model_type": "phi3", **dict.fromkeys(SIZES, 2)}


def test_sizes_from_one_on_and_defaults_are_sound() -> None:
    assert size_fault(SOUND) == size_fault({}) == size_fault(SOUND | {"head_dim": None}) == ""


@pytest.mark.parametrize("name", SIZES)
def test_a_model_of_none_is_refused_before_it_divides_by_it(tmp_path: Path, name: str) -> None:
    """Also after a download, where no config was looked at before."""
    (tmp_path / "config.json").write_text(json.dumps(SOUND | {name: 0}))
    with pytest.raises(CheckpointError, match=f"{tmp_path}/config.json .*{name} is 0: it must be 1 or more"):
        load_hf_config(tmp_path)


def test_code_of_a_checkpoint_is_neither_run_nor_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks on the terminal, where it is not told, and runs what it finds."""
    monkeypatch.setattr("builtins.input", pytest.fail)
    for kind in ("its_own", "phi3"):
        content = {"model_type": kind, "auto_map": {"AutoConfig": "code.Config"}}
        (tmp_path / "config.json").write_text(json.dumps(content))
        (tmp_path / "code.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
        if kind == "phi3":
            assert type(load_hf_config(tmp_path)).__module__.startswith("transformers.")
        else:
            with pytest.raises(CheckpointError, match="model_type 'its_own' is not supported; supported: .*phi3"):
                load_hf_config(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_sizes_of_a_text_tower_are_looked_at_too(tmp_path: Path) -> None:
    """A multimodal model's config holds them one level down."""
    content = {"model_type": "phi3", "text_config": SOUND | {"hidden_size": -1}}
    assert text_part(content) == content["text_config"] and text_part(SOUND) is SOUND
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="hidden_size is -1: it must be 1 or more"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("change", [{"rms_norm_eps": "x"}, {"rope_parameters": [1]}, {"tie_word_embeddings": "x"}])
def test_a_value_of_another_kind_is_named_in_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SOUND | change))
    with pytest.raises(CheckpointError, match=next(iter(change))) as caught:
        load_hf_config(tmp_path)
    assert "\n" not in str(caught.value)
    assert "TypeError" in str(caught.value)  # what is wrong with it, not only where


def test_an_adapter_in_the_place_of_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (problem,) = config_problems("adapter", tmp_path, 64)
    assert problem.startswith("source.path: adapter holds an adapter; give its base model here")


def test_a_file_that_holds_no_mapping(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a model's config"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("part", [[1], 7, "text", {"hidden_size": 8}])
def test_a_text_tower_that_is_none_is_named(tmp_path: Path, part: Any) -> None:
    """transformers takes whatever stands there for one, in families that have none."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", "text_config": part}))
    with pytest.raises(CheckpointError, match="can't be read as a model config"):
        load_hf_config(tmp_path)
