"""A small Qwen3.5 with an MTP layer, and the layer's arithmetic, written down once more.

vLLM, vllm/model_executor/models/qwen3_5_mtp.py at 01d9980 (`Qwen3_5MultiTokenPredictor.forward`), and transformers,
models/qwen3_5/modeling_qwen3_5.py, for the layer of full attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from models.tiny_families import tensors_of, tiny_model
from safetensors.torch import save_file
from torch import Tensor

FULL = 2  # the model's layer of full attention, whose tensors have the shapes of the MTP layer's
FREE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def target(kind: str = "qwen3_5_text", **changes: Any) -> Any:
    """transformers' tiny model, with weights that fp16 holds."""
    model = tiny_model(kind, **FREE, **changes)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.copy_(halved(name, weight))
    return model


def halved(name: str, weight: Tensor) -> Tensor:
    """A tensor in fp32 which fp16 holds; fp16 also holds 1 + weight if that is a gain."""
    is_gain = "norm" in name and not name.endswith("linear_attn.norm.weight")
    return (512 * weight).round() / 512 if is_gain else weight.half().float()


def drawn(model: Any, seed: int = 5) -> dict[str, Tensor]:
    """Tensors of an MTP layer with which attention is peaked and every branch counts; fp16 holds them."""
    random, text = torch.Generator().manual_seed(seed), model.config.get_text_config()
    width, found = text.hidden_size, dict[str, Tensor]()
    for name, weight in model.state_dict().items():
        _, inside, role = name.partition(f"layers.{FULL}.")
        if inside and "visual" not in name:
            size = 0.3 if weight.ndim == 1 else 1.5 / weight.shape[-1] ** 0.5
            found[f"mtp.layers.0.{role}"] = size * torch.randn(weight.shape, generator=random)
    found["mtp.fc.weight"] = torch.randn(width, 2 * width, generator=random) / (2 * width) ** 0.5
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        found[f"mtp.{name}.weight"] = 0.3 * torch.randn(width, generator=random)
    return {name: halved(name, each) for name, each in found.items()}


def write(model: Any, tensors: Mapping[str, Tensor], folder: Path, **changes: Any) -> Path:
    """Writes a checkpoint in fp16; `changes` go into the config of the text model."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(json.dumps(model.config.to_dict(), default=str))
    inner = content.get("text_config", content)
    inner |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False} | changes
    (folder / "config.json").write_text(json.dumps(content))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    held = {name: each for name, each in tensors_of(model).items() if name not in tied} | dict(tensors)
    save_file({name: each.half().contiguous() for name, each in held.items()}, folder / "model.safetensors")
    tiny.train_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


SETTINGS: dict[str, Any] = {"topology": [[0, 2], [2, 4]], "drafter": "mtp"}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (1 + weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def turned(x: Tensor, config: Any) -> Tensor:
    """Heads [n, heads, head_dim], whose first numbers are turned by the positions 0 .. n - 1."""
    rope = config.rope_parameters
    half = int(config.head_dim * rope["partial_rotary_factor"]) // 2
    angles = torch.arange(len(x))[:, None] * rope["rope_theta"] ** (-torch.arange(half) / half)
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1)[:, None] for f in (torch.cos, torch.sin))
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    crossed = torch.cat([-turning[..., half:], turning[..., :half]], dim=-1)
    return torch.cat([turning * cos + crossed * sin, rest], dim=-1)


def published(w: Mapping[str, Tensor], config: Any, embedded: Tensor, state: Tensor) -> Tensor:
    """The layer's normed outputs [n, d] for the embeddings of the next tokens and normed hidden states, each [n, d]."""
    eps, n, d, p = config.rms_norm_eps, len(state), config.head_dim, "mtp.layers.0."
    pair = [rms_norm(embedded, w["mtp.pre_fc_norm_embedding.weight"], eps)]
    pair.append(rms_norm(state, w["mtp.pre_fc_norm_hidden.weight"], eps))
    x = torch.cat(pair, -1) @ w["mtp.fc.weight"].T
    z = rms_norm(x, w[f"{p}input_layernorm.weight"], eps)
    both = (z @ w[f"{p}self_attn.q_proj.weight"].T).view(n, -1, 2, d)  # head by head: the query, then its gate
    k, v = ((z @ w[f"{p}self_attn.{name}_proj.weight"].T).view(n, -1, d) for name in "kv")
    q, k = (
        turned(rms_norm(each, w[f"{p}self_attn.{name}_norm.weight"], eps), config)
        for each, name in ((both[:, :, 0], "q"), (k, "k"))
    )
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / d**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = torch.einsum("hij,jhd->ihd", scores, v) * torch.sigmoid(both[:, :, 1])
    x = x + mixed.reshape(n, -1) @ w[f"{p}self_attn.o_proj.weight"].T
    z = rms_norm(x, w[f"{p}post_attention_layernorm.weight"], eps)
    gate, up = (z @ w[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{p}mlp.down_proj.weight"].T
    return rms_norm(x, w["mtp.norm.weight"], eps)


@torch.no_grad()
def greedy(
    model: Any,
    w: Mapping[str, Tensor],
    context: Sequence[int],
    count: int,
    raw: Tensor | None = None,
    vocab: int | None = None,
) -> tuple[list[int], list[Tensor]]:
    """Return the tokens that the layer drafts to follow `context`, and the logits of each, without any cache.

    `raw` are the model's last hidden states before its last norm, if not transformers' own. Of the tokens only the
    first `vocab` are drafted.
    """
    if raw is None:  # transformers' last hidden state is after the norm
        states = model.model(torch.tensor([context[:-1]]), use_cache=False).last_hidden_state[0]
    else:
        states = rms_norm(raw, model.model.norm.weight, model.config.rms_norm_eps)
    tokens, drafted, rows = list(context[1:]), list[int](), list[Tensor]()
    while len(drafted) < count:
        out = published(w, model.config, model.model.embed_tokens(torch.tensor(tokens)), states)
        rows.append(out[-1] @ model.lm_head.weight[:vocab].T)
        drafted.append(int(rows[-1].argmax()))
        tokens, states = [*tokens, drafted[-1]], torch.cat([states, out[-1:]])
    return drafted, rows


@torch.no_grad()
def continued(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The model's own greedy text of `count` tokens after a prompt."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
