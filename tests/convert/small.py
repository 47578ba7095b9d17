"""A tiny random Phi-3 checkpoint, written by transformers, and parts of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from models.small_configs import small_config
from transformers import Phi3Config, Phi3ForCausalLM

from shardmill import config, plan
from shardmill.checkpoint.headers import read_tensors
from shardmill.models import family
from shardmill.models.architecture import ModelDescription
from shardmill.models.hf_config import load_hf_config

LAYERS, SLOTS, VOCAB = 6, 64, 128


def write_checkpoint(folder: Path) -> Path:
    """Six layers of width 64 with two key/value heads for six heads, and partial rotary, as Phi-4-mini has them."""
    config = Phi3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        original_max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        pad_token_id=0,
        sliding_window=None,
    )
    torch.manual_seed(1)
    model = Phi3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # transformers starts norms at one, which coremltools would optimise away
                weight.copy_(1 + 0.2 * torch.randn_like(weight))
    model.save_pretrained(folder, max_shard_size="300KB")
    return folder


def write_family(folder: Path, model_type: str, **changes: Any) -> Path:
    """A small checkpoint of a family in which every constant matters, and coremltools drops or merges none."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    # The usual 0.02 would hide attention and convolutions behind the residual stream.
    config = small_config(model_type, **{"initializer_range": 0.125, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                gain = "norm" in name and not model_type.startswith("gemma")
                weight.copy_(gain + 0.2 * torch.randn_like(weight))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def described(folder: Path) -> ModelDescription:
    """The model, by the checkpoint's config and the names of its tensors."""
    hf = load_hf_config(folder)
    model: ModelDescription = family(hf.model_type).describe(hf, SLOTS)
    return model.stored_as(read_tensors(folder))


def draft(folder: Path, layers: list[list[int]], slices: int = 1) -> dict[str, plan.Part]:
    """The checkpoint's parts by name; nothing is hashed."""
    settings = {"model": "small", "source": {"path": str(folder)}, "context": SLOTS, "topology": layers}
    chosen = config.parse(settings | {"tokens": {"max": 4}, "head": {"slices": slices}})
    return {part.name: part for part in plan.draft_parts(chosen, described(folder), read_tensors(folder))}


def layers_part(folder: Path, start: int, end: int) -> plan.Part:
    """The part of layers [start, end)."""
    edges = sorted({0, start, end, described(folder).architecture.layers})
    return draft(folder, [list(pair) for pair in pairwise(edges)])[f"layers_{start:02d}_{end:02d}"]


def head_part(folder: Path, start: int, end: int) -> plan.Part:
    """The head of vocabulary rows [start, end), one of some of equal size."""
    rows = end - start
    return draft(folder, [[0, LAYERS]], described(folder).architecture.vocab // rows)[f"head_{start // rows}"]
