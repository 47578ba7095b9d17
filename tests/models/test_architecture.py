"""A checkpoint's config.json: what of it no model can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.errors import CheckpointError
from shardmill.models.architecture import SIZES, load_hf_config, size_fault

SOUND: dict[str, Any] = {"model_type": "phi3", **dict.fromkeys(SIZES, 2)}


def test_sizes_from_one_on_and_defaults_are_sound() -> None:
    assert size_fault(SOUND) == size_fault({}) == size_fault(SOUND | {"head_dim": None}) == ""


@pytest.mark.parametrize("name", SIZES)
def test_a_model_of_none_is_refused_before_it_divides_by_it(tmp_path: Path, name: str) -> None:
    """Also after a download, where no config was looked at before."""
    (tmp_path / "config.json").write_text(json.dumps(SOUND | {name: 0}))
    with pytest.raises(CheckpointError, match=f"{tmp_path}/config.json .*{name} is 0: it must be 1 or more"):
        load_hf_config(tmp_path)


def test_a_file_that_holds_no_mapping(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a model's config"):
        load_hf_config(tmp_path)
