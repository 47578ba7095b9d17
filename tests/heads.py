"""A small EAGLE-3 head for the tiny checkpoint, and the published arithmetic, written down once more.

SafeAILab/EAGLE, eagle/traineagle3/cnets.py at 9666a81: `LlamaDecoderLayeremb`, `LlamaAttention`, `Model.forward`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROWS, LAYER_IDS = 160, [0, 1, 2]  # the tokens that it drafts; layers of four whose outputs it reads
HEADS, KV_HEADS, HEAD_DIM, FFN, EPS, THETA = 3, 1, 32, 128, 1e-5, 10000.0


def content(**changes: Any) -> dict[str, Any]:
    """The head's config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": tiny.HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 2048,
        "vocab_size": tiny.VOCAB,
        "draft_vocab_size": ROWS,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS, "use_aux_hidden_state": True},
    } | changes


def tensors() -> dict[str, Tensor]:
    """Weights with which attention is peaked and every branch counts; uniform, so that INT8 costs little."""
    wide, d, q, kv = 2 * tiny.HIDDEN, tiny.HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"fc": (d, 3 * d), "lm_head": (ROWS, d), "midlayer.self_attn.o_proj": (d, q)}
    shapes |= {f"midlayer.self_attn.{name}_proj": (rows, wide) for name, rows in (("q", q), ("k", kv), ("v", kv))}
    shapes |= {"midlayer.mlp.gate_proj": (FFN, d), "midlayer.mlp.up_proj": (FFN, d), "midlayer.mlp.down_proj": (d, FFN)}
    norms = ("norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    found = {f"{name}.weight": tiny.drawn("norm", torch.empty(d)) * (1 + 0.1 * i) for i, name in enumerate(norms)}
    random = torch.Generator().manual_seed(5)
    for name, shape in shapes.items():
        found[f"{name}.weight"] = 1.5 * 3**0.5 * (2 * torch.rand(shape, generator=random) - 1) / shape[1] ** 0.5
    tokens = torch.sort(torch.randperm(tiny.VOCAB, generator=random)[:ROWS]).values
    return found | {"d2t": tokens - torch.arange(ROWS), "t2d": torch.isin(torch.arange(tiny.VOCAB), tokens)}


def speculators(**changes: Any) -> dict[str, Any]:
    """The config.json of such a head as the speculators library writes it; its layers are counted by their inputs."""
    layer = content()
    own = {"draft_vocab_size": layer.pop("draft_vocab_size"), "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    del layer["eagle_config"], layer["architectures"]
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "has_no_defaults_at_init": False,
        "norm_before_residual": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "torch_dtype": "bfloat16",
        "transformer_layer_config": layer,
        **own,
    } | changes


def write_head(folder: Path, written: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """Writes a head's checkpoint; its config is `written`, or the usual one with `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written or content(**changes)))
    bits = {
        name: each if each.dtype in (torch.int64, torch.bool) else each.bfloat16() for name, each in tensors().items()
    }
    save_file(bits, folder / "model.safetensors")
    return folder


def read_head(folder: Path) -> dict[str, Tensor]:
    """The tensors of a head's checkpoint, in fp32 where they are weights."""
    found = load_file(folder / "model.safetensors")
    return {name: each.float() if each.is_floating_point() else each for name, each in found.items()}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def turned(x: Tensor) -> Tensor:
    """Heads [n, heads, head_dim] turned by their positions 0 .. n - 1."""
    half = HEAD_DIM // 2
    angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def published(w: Mapping[str, Tensor], embedded: Tensor, read: Tensor, norm_first: bool = False) -> Tensor:
    """The layer's outputs [n, d] for embeddings and what it reads, each [n, d].

    `norm_first`: speculators, models/eagle3/model_definitions.py, `norm_before_residual`.
    """
    p, n = "midlayer.", len(read)
    normed = rms_norm(read, w[p + "hidden_norm.weight"])
    z = torch.cat([rms_norm(embedded, w[p + "input_layernorm.weight"]), normed], -1)
    read = normed if norm_first else read
    q, k, v = ((z @ w[f"{p}self_attn.{name}_proj.weight"].T).view(n, -1, HEAD_DIM) for name in "qkv")
    q, k, v = turned(q), turned(k).repeat_interleave(HEADS, 1), v.repeat_interleave(HEADS, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    y = read + torch.einsum("hij,jhd->ihd", scores, v).reshape(n, -1) @ w[f"{p}self_attn.o_proj.weight"].T
    x = rms_norm(y, w[p + "post_attention_layernorm.weight"])
    gate, up = x @ w[f"{p}mlp.gate_proj.weight"].T, x @ w[f"{p}mlp.up_proj.weight"].T
    return y + (torch.nn.functional.silu(gate) * up) @ w[f"{p}mlp.down_proj.weight"].T


def logits(w: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Logits [n, ROWS] of the layer's outputs [n, d]."""
    return rms_norm(hidden, w["norm.weight"]) @ w["lm_head.weight"].T


def greedy(
    w: Mapping[str, Tensor], table: Tensor, context: Sequence[int], taps: Tensor, count: int
) -> tuple[list[int], list[Tensor]]:
    """Return the tokens that a head drafts to follow `context`, and the logits of each.

    `taps` [n, 3 d] are the taps of the n positions before the last token.
    """
    tokens, read = list(context[1:]), taps @ w["fc.weight"].T
    found, rows = list[int](), list[Tensor]()
    while len(found) < count:
        out = published(w, table[torch.tensor(tokens)], read)
        rows.append(logits(w, out[-1:])[0])
        row = int(rows[-1].argmax())
        found.append(row + int(w["d2t"][row]))
        tokens, read = [*tokens, found[-1]], torch.cat([read, out[-1:]])
    return found, rows
