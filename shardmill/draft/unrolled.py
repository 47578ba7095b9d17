"""All steps of drafts from every position of a text at once, as training and measuring need them.

Row i of step 0 is the pair of the hidden state at i and the token i + 1. Row i of step j stands for position i + j. It
is fed the text's token i + j + 1, and the head's own output of row i in the step before. It sees the true pairs up to
i, and after them row i in steps 1 to j. Up to the first wrong token of a draft, decoding computes the same numbers.

Source: SafeAILab/EAGLE, eagle/traineagle3/cnets.py at 9666a81 (`cache_hidden`: training-time test).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from shardmill.gates.eagle3 import ReferenceHead


def unrolled(head: ReferenceHead, embedded: Tensor, taps: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield logits [texts, rows of step j, vocabulary] of each step j; row i of step j predicts token i + j + 2.

    Args:
        head: the head.
        embedded: the embedding of each token, [texts, n, d].
        taps: the model's hidden states, [texts, n, 3 d].
        steps: how many steps; step j has n - 1 - j rows.
    """
    read, kept = head.fuse(taps)[:, :-1], list[tuple[Tensor, Tensor]]()
    for step in range(steps):
        count = taps.shape[1] - 1 - step
        fed = embedded[:, 1 + step : 1 + step + count]
        kept = [(k[:, :, :count], v[:, :, :count]) for k, v in kept]
        read = _step(head, fed, read[:, :count], step, kept)
        yield head.logits(read)


def _step(head: ReferenceHead, embedded: Tensor, read: Tensor, step: int, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the layer's outputs [texts, n, d]; add its keys and values to the earlier steps' ones."""
    layer: Any = head.midlayer
    attention, texts, count = layer.self_attn, *read.shape[:2]
    z = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(read)], dim=-1)
    q, k, v = (
        projected(z).view(texts, count, -1, attention.head_dim).transpose(1, 2)  # [texts, heads, n, head_dim]
        for projected in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *head.rotary(z, torch.arange(step, step + count)[None]))
    group = attention.num_key_value_groups
    kept.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    first_k, first_v = kept[0]
    unseen = torch.ones(count, first_k.shape[2], dtype=torch.bool).triu(1)
    scores = [(q @ first_k.transpose(2, 3)).masked_fill(unseen, -torch.inf)]
    scores += [(q * own).sum(-1, keepdim=True) for own, _ in kept[1:]]
    shares = (torch.cat(scores, dim=-1) * attention.scaling).softmax(-1)
    mixed = shares[..., : first_k.shape[2]] @ first_v
    for number, (_, own) in enumerate(kept[1:]):
        mixed = mixed + shares[..., first_k.shape[2] + number, None] * own
    y = read + attention.o_proj(mixed.transpose(1, 2).reshape(texts, count, -1))
    found: Tensor = y + layer.mlp(layer.post_attention_layernorm(y))
    return found
