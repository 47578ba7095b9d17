"""A config that a family stumbles over is told in one line; a bug of the family is not told as the config's fault."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from models.tiny_configs import tiny_config
from shardmill.errors import CheckpointError
from shardmill.models import family
from shardmill.models.hf_config import model_description


def test_a_null_field_is_the_config_s_fault() -> None:
    config = tiny_config("granitemoe", logits_scaling=None)
    with pytest.raises(CheckpointError, match="a field is null, or of another type than a granitemoe model's"):
        model_description(family("granitemoe"), config, 64)


def test_a_bug_of_a_family_is_not_told_as_the_config_s_fault() -> None:
    """It shows on transformers' own default config too."""
    broken = ModuleType("broken")

    def describe(config: Any, length: int) -> Any:
        return config.no_such_field

    broken.describe = describe  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such_field"):
        model_description(broken, tiny_config("llama"), 64)


def test_a_default_config_that_is_refused_shows_no_bug() -> None:
    """LFM2's mixture refuses the default, which names no layer types: the null field is still the config's fault."""
    config = tiny_config("lfm2_moe")
    vars(config)["num_experts"] = None  # transformers checks the type of an attribute that is set
    with pytest.raises(CheckpointError, match="a field is null, or of another type than a lfm2_moe model's"):
        model_description(family("lfm2_moe"), config, 64)
