"""A tiny random Phi-3 checkpoint, written by transformers, and parts of it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Phi3Config, Phi3ForCausalLM

from shardmill import plan
from shardmill.checkpoint.headers import read_tensors
from shardmill.models import phi3
from shardmill.models.architecture import load_hf_config

LAYERS, SLOTS = 6, 64


def write_checkpoint(folder: Path) -> Path:
    """Six layers of width 64 with two key/value heads for six heads, and partial rotary, as Phi-4-mini has them."""
    config = Phi3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=128,
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


def layers_part(folder: Path, start: int, end: int) -> plan.Part:
    """The part of layers [start, end)."""
    a = phi3.architecture(load_hf_config(folder), SLOTS)
    tensors = read_tensors(folder)
    names = [name for i in range(start, end) for name in phi3.layer_tensor_shapes(a.graph, i)]
    chosen = tuple(plan.whole(tensors[name]) for name in names)
    return plan.Part(f"layers_{start:02d}_{end:02d}", "layers", start, end, SLOTS, 4, a.graph, chosen)


def head_part(folder: Path, start: int, end: int) -> plan.Part:
    """The head of vocabulary rows [start, end)."""
    a = phi3.architecture(load_hf_config(folder), SLOTS)
    tensors = read_tensors(folder)
    chosen = (plan.whole(tensors[phi3.FINAL_NORM]), plan.slice_rows(tensors[phi3.EMBEDDING], start, end))
    return plan.Part("head_1", "head", start, end, 0, 4, a.graph, chosen)
