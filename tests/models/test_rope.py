"""Rotary tables are those that the family's own module computes for a sequence of that length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any

import limits
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from shardmill.errors import CheckpointError
from shardmill.models import family
from shardmill.models.contract import rope_inputs
from shardmill.models.rotary import rope
from shardmill.runtime.kv import rope_tables

CONTEXT = 96
BASE: dict[str, Any] = {"rope_theta": 10000.0}
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1 + 0.1 * i for i in range(16)],
        "long_factor": [2 + 0.5 * i for i in range(16)],
        "original_max_position_embeddings": 64,
    },
}
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
MODULES = {
    "llama": "llama.modeling_llama.LlamaRotaryEmbedding",
    "qwen3": "qwen3.modeling_qwen3.Qwen3RotaryEmbedding",
    "olmo2": "olmo2.modeling_olmo2.Olmo2RotaryEmbedding",
    "phi3": "phi3.modeling_phi3.Phi3RotaryEmbedding",
    "lfm2": "lfm2.modeling_lfm2.Lfm2RotaryEmbedding",
    "gemma3_text": "gemma3.modeling_gemma3.Gemma3RotaryEmbedding",
    "hunyuan_v1_dense": "hunyuan_v1_dense.modeling_hunyuan_v1_dense.HunYuanDenseV1RotaryEmbedding",
}


def config(model_type: str, **parameters: Any) -> Any:
    return AutoConfig.for_model(model_type, **SIZES, rope_parameters=BASE | parameters)


def theirs(model_type: str, hf: Any, length: int, *arguments: Any) -> list[np.ndarray]:
    """cos and sin [length, rope_dim / 2] of transformers' module; its halves are alike."""
    name, _, cls = MODULES[model_type].rpartition(".")
    module = getattr(import_module(f"transformers.models.{name}"), cls)(hf)
    tables = module(torch.zeros(1), torch.arange(length)[None], *arguments)
    return [table[0, :, : table.shape[-1] // 2].detach().numpy() for table in tables]


def assert_same(found: Mapping[str, Any], expected: list[np.ndarray], length: int) -> None:
    for ours, other in zip(rope_tables(found, length), expected, strict=True):
        # An angle of up to `length` is rounded in its size, and cosine and sine move by as much.
        limits.numbers_agree("cosines or sines", ours, other, limits.roundings("fp32", length), size=1)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2", "lfm2"])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_a_type_is_the_family_s_own_rotary_module(model_type: str, kind: str) -> None:
    hf = config(model_type, rope_type=kind, **TYPES[kind])
    found = rope(hf, CONTEXT)
    assert_same(asdict(found), theirs(model_type, hf, CONTEXT), CONTEXT)
    assert (found.factors, found.dim) == ("default", 32)


def test_the_types_are_told_apart() -> None:
    """The tests above would pass if every type were the default one, in transformers and here."""
    found = [rope(config("llama", rope_type=kind, **TYPES[kind]), CONTEXT) for kind in TYPES]
    assert len({(r.inv_freq, r.scale) for r in found}) == len(TYPES)
    assert rope(config("llama", rope_type="yarn", **TYPES["yarn"]), CONTEXT).scale > 1.1


@pytest.mark.parametrize(("length", "factors"), [(64, "short"), (65, "long"), (200, "long")])
def test_longrope_has_the_factors_of_a_sequence_of_that_length(length: int, factors: str) -> None:
    hf = AutoConfig.for_model(
        "phi3",
        **SIZES,
        original_max_position_embeddings=64,
        rope_parameters=BASE | {"rope_type": "longrope"} | TYPES["longrope"],
    )
    found = rope(hf, length)
    assert_same(asdict(found), theirs("phi3", hf, length), length)
    assert found.factors == factors
    assert found.scale > 1.1


def test_partial_rotary_turns_a_part_of_each_head() -> None:
    hf = config("phi3", rope_type="default", partial_rotary_factor=0.75)
    assert rope(hf, CONTEXT).dim == 24
    assert_same(asdict(rope(hf, CONTEXT)), theirs("phi3", hf, CONTEXT), CONTEXT)


def test_layer_types_have_tables_of_their_own() -> None:
    """Gemma 3: another base frequency on sliding layers, and a factor on the others."""
    parameters = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = ["sliding_attention", "full_attention"]
    hf = AutoConfig.for_model("gemma3_text", **SIZES, rope_parameters=parameters, layer_types=kinds)
    both = {kind: rope(hf, CONTEXT, kind) for kind in parameters}
    for kind, found in both.items():
        assert_same(asdict(found), theirs("gemma3_text", hf, CONTEXT, kind), CONTEXT)
    assert len(set(both.values())) == 2
    described = family("gemma3_text").describe(hf, 64).architecture
    assert {rope_inputs(name)[0] for name in described.ropes} == {"rope_cos", "rope_cos_local"}
    assert list(described.ropes.values()) == list(both.values())


def test_a_model_of_one_layer_type_has_its_table_only() -> None:
    for kind, name in (("full_attention", "rope"), ("sliding_attention", "rope_local")):
        hf = AutoConfig.for_model("gemma3_text", **SIZES, layer_types=[kind] * 2)
        assert list(family("gemma3_text").describe(hf, 64).architecture.ropes) == [name]


def test_an_alpha_is_a_base_frequency_for_all_lengths() -> None:
    """Hunyuan's module reads rope_type dynamic so; elsewhere it means frequencies that change with the length."""
    hf = config("hunyuan_v1_dense", rope_type="dynamic", alpha=1000.0, factor=1.0)
    found = family("hunyuan_v1_dense").describe(hf, CONTEXT).architecture.ropes["rope"]
    assert_same(asdict(found), theirs("hunyuan_v1_dense", hf, CONTEXT), CONTEXT)
    assert found != rope(config("hunyuan_v1_dense", rope_type="default"), CONTEXT)
    with pytest.raises(CheckpointError, match="rope_type 'dynamic' is not supported; supported: default, .*longrope"):
        rope(config("llama", rope_type="dynamic", factor=2.0), CONTEXT)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 0.0},
        {"rope_type": "linear", "factor": "x"},
        {"rope_type": "default", "rope_theta": 0.0},
        {"rope_type": "default", "rope_theta": None},
        {"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [1.0]},
        {"rope_type": "of its own"},
    ],
)
def test_what_gives_no_table_of_numbers_is_refused_in_one_line(parameters: dict[str, Any]) -> None:
    hf = config("llama")
    hf.rope_parameters = BASE | parameters  # as a config.json may have it; transformers only warns
    with pytest.raises(CheckpointError) as caught:
        rope(hf, CONTEXT)
    assert str(caught.value).startswith("rope_parameters: no rotary table can be made of them: ")
    assert "\n" not in str(caught.value)
