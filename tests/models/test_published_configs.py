"""Published config.json files are taken as they are, and describe as many parameters as transformers' model has."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmill import plan
from shardmill.models import ENCODER, family
from shardmill.models.hf_config import load_hf_config, model_description

from . import tiny_families as tiny
from .published_configs import EMBEDDING_GEMMA_2, PUBLISHED

CONTEXT = 2048
# Checkpoint -> its family, and fields of its config.json that transformers does not read.
UNREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2-3b": (
        "starcoder2",
        {
            "activation_function": "gelu",
            "attention_softmax_in_fp32": True,
            "layer_norm_epsilon": 1e-3,  # as the tiny model's norm_epsilon
            "mlp_type": "default",
            "norm_type": "layer_norm",
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
        },
    ),
    "Falcon3-1B": ("llama", {"activation": "swiglu"}),
    "gpt-oss-120b": ("gpt_oss", {"experts_per_token": 3, "initial_context_length": 4096}),
    "Qwen3-Coder-30B-A3B": (
        "qwen3_moe",
        {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    ),
    "Hy-MT2-7B": (
        "hunyuan_v1_dense",
        {
            "add_classification_head": False,
            "attention_head_dim": 128,
            "class_num": 0,
            "dense_list": [4096, 0],
            "im_end_id": 5,
            "im_newline_id": 11,
            "im_start_id": 4,
            "mask_init_id": 12,
            "norm_type": "rms",
            "org_vocab_size": 128167,
            "pad_id": 127961,
            "pool_type": "last",
            "text_end_id": 7,
            "text_start_id": 6,
            "use_cla": False,
        },
    ),
}


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


@pytest.mark.parametrize("name", UNREAD)
def test_a_published_field_that_transformers_does_not_read_changes_nothing(name: str) -> None:
    """Neither here nor in transformers, whose logits are the same to the bit."""
    model_type, fields = UNREAD[name]
    models = [tiny.tiny_model(model_type), tiny.tiny_model(model_type, **fields)]
    assert all(getattr(models[1].config, field) == value for field, value in fields.items())
    plain, told = map(tiny.described, models)
    assert told == plain
    plain_logits, told_logits = (tiny.expected(model, tiny.tiny_text(8)) for model in models)
    assert (told_logits == plain_logits).all()
