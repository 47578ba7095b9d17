"""Published config.json files are taken as they are, and describe as many parameters as transformers' model has."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch

from shardmill import plan
from shardmill.models import ENCODER, family
from shardmill.models.hf_config import load_hf_config, model_description

from .published_configs import EMBEDDING_GEMMA_2, PUBLISHED

CONTEXT = 2048


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    billions, content = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = load_hf_config(tmp_path)
    shapes = plan.tensor_shapes(model_description(family(config.model_type), config, CONTEXT))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    count = sum(map(prod, shapes.values()))
    assert count == sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=3e-3)


def test_the_config_of_a_published_encoder_is_taken_as_it_is(tmp_path: Path) -> None:
    """The text tower's tensors, each layer's number among them, hold as many numbers as transformers' model."""
    from transformers import AutoModel

    (tmp_path / "config.json").write_text(json.dumps(EMBEDDING_GEMMA_2))
    config = load_hf_config(tmp_path)
    description = model_description(family(config.model_type, ENCODER), config, CONTEXT)
    with torch.device("meta"):
        model = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    count = sum(map(prod, plan.tensor_shapes(description).values()))
    assert count == sum(tensor.numel() for tensor in model.state_dict().values()) == 271_002_648
    a = description.architecture
    assert (a.band, {(kind.head_dim, kind.kv_heads) for kind in a.kinds}) == (512, {(256, 2), (512, 1)})
