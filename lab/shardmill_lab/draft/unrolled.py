"""Steps of drafts from many positions of texts at once, as training and measuring need them.

Row i of step 0 is the pair of the hidden state at i and the token i + 1. Row i of step j stands for position i + j. It
is fed the text's token i + j + 1, and the head's own output of row i in the step before. It sees the true pairs up to
i, and after them row i in steps 1 to j. As in decoding, a row goes on only while its drafts are the text's tokens; so
decoding computes the same numbers, and rows that decoding would never compute cost nothing here.

Source: SafeAILab/EAGLE, eagle/traineagle3/cnets.py at 9666a81 (`cache_hidden`: training-time test).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from shardmill.models.eagle3_head import Eagle3Head


@dataclass(frozen=True)
class Rows:
    """A step's rows of each text; there are as many for every text, and some stand for nothing.

    Attributes:
        places: the position at which each row's draft begins, [texts, rows].
        real: whether the row stands for a draft, [texts, rows].
        logits: [texts, rows, tokens of the head]; row i of step j predicts token i + j + 2.
    """

    places: Tensor
    real: Tensor
    logits: Tensor


def asked_rows(chosen: Tensor) -> Tensor:
    """Return the positions at which drafts begin, [texts, n]: the model has chosen the next two tokens."""
    return torch.nn.functional.pad(chosen[:, 1:-1] & chosen[:, 2:], (0, 2))


def right_drafts(tokens: Tensor, chosen: Tensor, ids: Tensor) -> Callable[[int, Rows], tuple[Tensor, Tensor]]:
    """Return a function of a step and its rows: whether each row drafts the text's token, and whether it goes on.

    Args:
        tokens: the texts, [texts, n].
        chosen: the tokens that the model has chosen, [texts, n].
        ids: the token of each of the head's rows.
    """
    last = tokens.shape[1] - 1

    def compare(step: int, rows: Rows) -> tuple[Tensor, Tensor]:
        drafted = (rows.places + step + 2).clamp(max=last)
        right = rows.real & (ids[rows.logits.argmax(-1)] == tokens.gather(1, drafted))
        further = (drafted < last) & chosen.gather(1, (drafted + 1).clamp(max=last))
        return right, right & further

    return compare


def unrolled(
    head: Eagle3Head,
    embedded: Tensor,
    taps: Tensor,
    asked: Tensor,
    steps: int,
    goes_on: Callable[[int, Rows], Tensor],
) -> Iterator[Rows]:
    """Yield the rows of each step, until no row is left.

    Args:
        head: the head.
        embedded: the embedding of each token, [texts, n, d].
        taps: the model's hidden states, [texts, n, 3 d].
        asked: the positions at which drafts begin, [texts, n]; not the last.
        steps: how many steps at most.
        goes_on: given a step's number and its rows, whether each row goes on, [texts, rows].
    """
    first = head.fuse(taps)
    embedded = torch.cat([embedded[:, 1:], embedded[:, -1:]], dim=1)  # of the token after each position
    normed = _normed(head, embedded, first)
    cached = _keys_and_values(head, normed, torch.arange(taps.shape[1])[None])
    further: list[tuple[Tensor, Tensor]] = []
    going, places = asked, torch.arange(taps.shape[1]).expand(asked.shape)
    read, z = first, normed
    for step in range(steps):
        count = int(going.sum(1).max())
        if not count:
            return
        order = going.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        real, places, read = going.gather(1, order), places.gather(1, order), rows_of(read, order)
        further = [(rows_of(k, order), rows_of(v, order)) for k, v in further]
        if step:
            z = _normed(head, rows_of(embedded, (places + step).clamp(max=taps.shape[1] - 1)), read)
            further.append(_keys_and_values(head, z, places + step))
        else:
            z = rows_of(z, order)
        read = _outputs(head, z, read, places, step, cached, further)
        rows = Rows(places, real, head.logits(read))
        yield rows
        going = real & goes_on(step, rows)


def rows_of(x: Tensor, order: Tensor) -> Tensor:
    """Return rows of each text: [texts, r, ...] of [texts, n, ...], by their numbers [texts, r]."""
    texts, n = x.shape[:2]
    flat = (torch.arange(texts)[:, None] * n + order).flatten()
    return x.flatten(0, 1).index_select(0, flat).reshape(*order.shape, *x.shape[2:])


def _normed(head: Eagle3Head, embedded: Tensor, read: Tensor) -> Tensor:
    """Return the input of the layer's attention, [texts, r, 2 d]."""
    layer: Any = head.midlayer
    return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(read)], dim=-1)


def _keys_and_values(head: Eagle3Head, z: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys, turned by their positions, and values: [texts, r, heads, head_dim] each."""
    attention: Any = head.midlayer.self_attn
    k, v = (projected(z).unflatten(-1, (-1, attention.head_dim)) for projected in (attention.k_proj, attention.v_proj))
    cos, sin = head.rotary(z, positions)
    k, _ = apply_rotary_pos_emb(k, k, cos, sin, unsqueeze_dim=2)
    group = attention.num_key_value_groups
    return k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)


def _outputs(
    head: Eagle3Head,
    z: Tensor,
    read: Tensor,
    places: Tensor,
    step: int,
    cached: tuple[Tensor, Tensor],
    further: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Return the layer's outputs of a step's rows, [texts, r, d]; the arguments are named as in `unrolled`."""
    layer: Any = head.midlayer
    attention, (keys, values) = layer.self_attn, cached
    q = attention.q_proj(z).unflatten(-1, (-1, attention.head_dim))
    q, _ = apply_rotary_pos_emb(q, q, *head.rotary(z, places + step), unsqueeze_dim=2)
    unseen = torch.arange(keys.shape[1]) > places[..., None]  # [texts, r, n]
    scores = torch.einsum("tihd,tjhd->thij", q, keys).masked_fill(unseen[:, None], -torch.inf)
    further_scores = [(q * k).sum(-1).transpose(1, 2)[..., None] for k, _ in further]  # [texts, heads, r, 1]
    shares = (torch.cat([scores, *further_scores], dim=-1) * attention.scaling).softmax(-1)
    mixed = torch.einsum("thij,tjhd->tihd", shares[..., : keys.shape[1]], values)
    for number, (_, v) in enumerate(further):
        mixed = mixed + shares[..., keys.shape[1] + number].transpose(1, 2)[..., None] * v
    y = read + attention.o_proj(mixed.flatten(2))
    outputs: Tensor = y + layer.mlp(layer.post_attention_layernorm(y))
    return outputs
