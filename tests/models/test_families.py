"""Every family that has a file computes what transformers computes: through its blocks, and as it is shipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
import torch
from convert.small import layers_part

from shardmill.checkpoint.headers import read_tensors
from shardmill.convert.weights import PartWeights
from shardmill.errors import CheckpointError
from shardmill.gates.passes import schedules
from shardmill.gates.stack import feed
from shardmill.models import supported
from shardmill.models.architecture import with_tanh

from . import tiny_families as tiny
from .tiny_configs import TINY, tiny_config


def test_every_family_has_a_tiny_config() -> None:
    """A family without one would not be tested at all."""
    assert set(TINY) == set(supported())


def has_silu(model_type: str) -> bool:
    """Whether an MLP or an expert of a tiny model has SiLU, by transformers' config; lfm2's names no activation."""
    config, fields = tiny_config(model_type).get_text_config(), ("hidden_act", "hidden_activation", "mlp_hidden_act")
    return {getattr(config, field, None) for field in fields} <= {None, "silu", "swish"}


def test_silu_from_tanh_is_refused_where_there_is_no_silu() -> None:
    """The key would do nothing there."""
    refused = set()
    for model_type in supported():
        architecture = tiny.described(tiny.tiny_model(model_type)).architecture
        try:
            assert with_tanh(architecture).graph.activation == "silu_tanh", model_type
        except CheckpointError:
            refused.add(model_type)
    assert refused == {name for name in supported() if not has_silu(name)}


# The kinds of layers and the graph's options are those of another family, which README's lane has.
ALIKE = {
    *("ernie4_5", "hunyuan_v1_dense", "ministral3", "mistral", "mistral3", "qwen2", "seed_oss", "smollm3", "smolvlm"),
    *("exaone4", "gemma3", "gemma4", "gemma4_unified", "gemma4_unified_text", "olmo3", "olmoe", "stablelm"),
    *("qwen3_5", "qwen3_5_moe", "starcoder2"),
}


@pytest.mark.thorough(but=[*(f"{name}-native" for name in supported() if name not in ALIKE), "llama-tanh"])
@pytest.mark.parametrize("silu", ["native", "tanh"])
@pytest.mark.parametrize("model_type", supported())
def test_blocks_compute_what_transformers_computes(model_type: str, silu: str) -> None:
    """In passes of every width, and with drafts that are rejected; in both spellings of SiLU."""
    if silu == "tanh" and not has_silu(model_type):
        pytest.skip("no SiLU")
    model, tokens = tiny.tiny_model(model_type), tiny.tiny_text()
    truth, described, limit = tiny.expected(model, tokens), tiny.described(model), tiny.limit_of(model)
    if silu == "tanh":
        described = replace(described, architecture=with_tanh(described.architecture))
    engine: Any = tiny.Blocks(described, tiny.tensors_of(model))
    passes = schedules(len(tokens), engine.verify, engine.tokens_max) | {"random": tiny.random_passes(len(tokens), 0)}
    for name, schedule in passes.items():
        logits = feed(engine, tokens, schedule)
        limits.rows_agree(f"{model_type}, {name}", logits, truth, limit)
        assert np.array_equal(logits.argmax(-1), truth.argmax(-1)), name


def test_experts_in_two_tensors_are_the_experts_that_have_a_tensor_for_each_projection(tmp_path: Path) -> None:
    """Published checkpoints of Qwen3.5 have the former layout, transformers writes the latter."""
    found = []
    for stacked in (True, False):
        folder = tiny.write_tiny("qwen3_5_moe", tmp_path / f"stacked {stacked}", stacked=stacked)
        assert any(name.endswith("experts.gate_up_proj") for name in read_tensors(folder)) is stacked
        part = layers_part(folder, 0, 4)
        found.append(dict(PartWeights(part, folder)))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(weight, found[1][path]) for path, weight in found[0].items())
