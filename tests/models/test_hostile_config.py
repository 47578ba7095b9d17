"""config.json from a stranger: numbers that no model has are refused by name, before anything is computed from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from shardmill import config
from shardmill.errors import CheckpointError, ConfigError
from shardmill.models import family
from shardmill.models.hf_config import MOST_EXPERTS, MOST_LABELS, SIZES, content_fault, load_hf_config, number_fault

from .tiny_configs import tiny_config

HUGE = 10**9
NOT_FINITE = {
    "NaN": ('{"rms_norm_eps": NaN}', "rms_norm_eps is nan"),
    "Infinity": ('{"rope_theta": -Infinity}', "rope_theta is -inf"),
    "a number out of range": ('{"initializer_range": 1e999}', "initializer_range is inf"),
    "in a list": ('{"rope_scaling": {"short_factor": [1.0, NaN]}}', "rope_scaling.short_factor.1 is nan"),
    "in transformers' spelling": ('{"eps": {"__float__": "Infinity"}}', "eps is Infinity"),
    "in the text tower": ('{"text_config": {"rms_norm_eps": NaN}}', "text_config.rms_norm_eps is nan"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tower", [False, True])
def test_a_size_beyond_belief_is_refused_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, tower: bool
) -> None:
    """transformers would make a list of a billion layers when it reads the file, and a table of as many angles."""
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", pytest.fail)
    inner = {size: HUGE}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "phi3", **({"text_config": inner} if tower else inner)})
    )
    with pytest.raises(CheckpointError, match=f"{size} is {HUGE}: it may be {SIZES[size]} at most"):
        load_hf_config(tmp_path)
    assert content_fault({size: SIZES[size]}) == ""


@pytest.mark.parametrize(
    ("name", "most"), [(n, MOST_EXPERTS) for n in ("num_experts", "num_local_experts")] + [("num_labels", MOST_LABELS)]
)
@pytest.mark.parametrize("tower", [False, True])
def test_a_number_that_may_be_none_is_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int, tower: bool
) -> None:
    """transformers makes a name for each label, and a billion of them take all memory; so do experts' tensors here."""
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", pytest.fail)
    inner = {name: HUGE}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "phi3", **({"text_config": inner} if tower else inner)})
    )
    with pytest.raises(CheckpointError, match=f"{name} is {HUGE}: it may be {most} at most"):
        load_hf_config(tmp_path)
    assert not any(content_fault({name: value}) for value in (0, None, most))


@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_number_that_is_not_finite_is_named(tmp_path: Path, name: str) -> None:
    """By the config of a local checkpoint, and by the split step for one from the hub."""
    text, message = NOT_FINITE[name]
    (tmp_path / "config.json").write_text(text.replace("{", '{"model_type": "phi3", ', 1))
    content = tiny.settings(str(tmp_path))
    with pytest.raises(ConfigError, match=f"config.json: {message}: it must be a finite number"):
        config.parse(content)
    with pytest.raises(CheckpointError, match=f"{message}: it must be a finite number"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("limit", ["[0.0, Infinity]", '[0.0, {"__float__": "Infinity"}]'])
def test_a_mamba_layer_s_step_may_have_no_limit(tmp_path: Path, limit: str) -> None:
    """Every Granite 4 says so, in either spelling, though it may have no such layer."""
    content = json.dumps(tiny_config("granitemoehybrid").to_dict() | {"time_step_limit": None})
    (tmp_path / "config.json").write_text(content.replace('"time_step_limit": null', f'"time_step_limit": {limit}'))
    found = load_hf_config(tmp_path)
    assert found.time_step_limit == (0.0, float("inf"))
    assert family("granitemoehybrid").describe(found, 64).architecture.layers == found.num_hidden_layers


def test_numbers_of_real_configs_are_finite() -> None:
    assert number_fault(tiny.hf_config().to_dict()) == ""


@pytest.mark.parametrize("kind", ["default", "longrope"])
@pytest.mark.parametrize("share", [1e8, 1.01, 0, -1])
def test_no_rotary_table_longer_than_a_head_is_made(monkeypatch: pytest.MonkeyPatch, kind: str, share: Any) -> None:
    """Its length is head_dim times this share, whatever the share is."""
    monkeypatch.setattr("torch.arange", pytest.fail)
    found = tiny.hf_config()
    found.rope_parameters |= {"partial_rotary_factor": share, "rope_type": kind}
    with pytest.raises(CheckpointError, match=f"partial_rotary_factor is {share}: it must be over 0 and at most 1"):
        family("phi3").describe(found, tiny.CONTEXT)
