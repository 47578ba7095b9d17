"""An EAGLE-3 head out of transformers' modules, and the cases of its parts.

transformers does not know EAGLE-3. The layer of a head is a Llama layer whose attention reads twice the width. So the
module here is transformers' layer with other projections, joined as the published code joins them; models/eagle3.py
lists the sources. The module's parameters have the names of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shardmill.checkpoint.headers import read_tensors
from shardmill.convert.weights import read_info
from shardmill.gates.case import Case, compared
from shardmill.gates.reference import ReferenceDrafter, Steps
from shardmill.gates.stored import StoredWeights
from shardmill.models.eagle3 import EAGLE3, FOLDER, TAPS, TOKENS, load_head_config
from shardmill.plan import Part


class ReferenceHead(nn.Module):
    """A head; all its inputs and outputs have a row for each token of one text."""

    def __init__(self, config: Any) -> None:
        """Build the head in fp32, with transformers' initial weights.

        Args:
            config: transformers' LlamaConfig of one layer, with `draft_vocab_size` unless that is `vocab_size`.
        """
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        config, width = copy(config), config.hidden_size
        config._attn_implementation = "eager"
        self.config, rows = config, getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.fc = nn.Linear(TAPS * width, width, bias=False)
        self.midlayer = LlamaDecoderLayer(config, 0)
        attention, bias = self.midlayer.self_attn, bool(config.attention_bias)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, nn.Linear(2 * width, getattr(attention, name).out_features, bias))
        self.midlayer.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.norm, self.lm_head = LlamaRMSNorm(width, config.rms_norm_eps), nn.Linear(width, rows, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def fuse(self, taps: Tensor) -> Tensor:
        """Return what the layer reads of the model's hidden states: [n, d] of [n, 3 d]."""
        found: Tensor = self.fc(taps)
        return found

    def forward(self, embedded: Tensor, read: Tensor) -> Tensor:
        """Return the layer's outputs [n, d] at positions 0 .. n - 1; a position sees itself and earlier ones.

        Args:
            embedded: the embedding of the token after each position, [n, d].
            read: what `fuse` gives at each position, [n, d].
        """
        layer: Any = self.midlayer
        count = len(read)
        normed = layer.hidden_norm(read)
        z = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)[None]
        turns = self.rotary(z, torch.arange(count)[None])
        mask = torch.full((count, count), torch.finfo(z.dtype).min).triu(1)[None, None]
        mixed, _ = layer.self_attn(hidden_states=z, position_embeddings=turns, attention_mask=mask)
        y = (normed if getattr(self.config, "norm_before_residual", False) else read) + mixed[0]
        found: Tensor = y + layer.mlp(layer.post_attention_layernorm(y))
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, rows] of the layer's outputs [n, d]."""
        found: Tensor = self.lm_head(self.norm(hidden))
        return found


def load_head(folder: Path) -> ReferenceHead:
    """Return the head of a checkpoint, in fp32."""
    head, tensors = ReferenceHead(load_head_config(folder)).eval(), read_tensors(folder)
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(read_info(tensors[name.replace("midlayer.", prefix)], folder).float())
    return head.requires_grad_(False)


def head_case(
    part: Part, plan: Mapping[str, Any], known: Mapping[str, Tensor], source: Path, stored: StoredWeights
) -> Case:
    """Return the case of a part of a head: the text's pairs of a hidden state and the token after it.

    Args:
        part: the part.
        plan: plan.json's content.
        known: transformers' results for the text with the original weights: hidden [layers + 1, n, d or more].
        source: the model's checkpoint, with the head's in a folder inside it.
        stored: the package's weights.
    """
    (exact, held), width = (load_head(source / FOLDER) for _ in range(2)), part.graph.hidden
    hidden = known["hidden"][:, :, :width]
    _hold(held, stored)
    with torch.no_grad():
        tapped = torch.cat([hidden[layer] for layer in plan["drafter"]["taps"]], dim=-1)
        embedded, read = hidden[0, 1:], exact.fuse(tapped)[:-1]
        last = exact(embedded, read)
        if part.kind == "fuse":
            return compared({"x": tapped}, lambda head: head.fuse(tapped), held, exact)
        if part.kind == "head":
            return compared({"hidden": last}, lambda head: head.logits(last), held, exact)
        x = torch.cat([embedded, read], dim=-1)
        return compared({"x": x}, lambda head: head(embedded, read), held, exact)


def reference_head(
    plan: Mapping[str, Any], source: Path, held: Iterable[StoredWeights], embed: Callable[[Sequence[int]], Tensor]
) -> ReferenceDrafter:
    """Return a head that drafts; it knows the checkpoint's own tokens of its rows.

    Args:
        plan: plan.json's content.
        source: the model's checkpoint, with the head's in a folder inside it.
        held: the weights of the head's packages.
        embed: returns the model's embeddings of tokens, [n, d].
    """
    head, known = load_head(source / FOLDER), read_tensors(source / FOLDER)
    for stored in held:
        _hold(head, stored)
    ids = torch.arange(head.lm_head.out_features)
    if TOKENS in known:
        with safe_open(source / FOLDER / known[TOKENS].file, "pt") as file:
            ids = ids + file.get_tensor(TOKENS)

    def begin(hidden: Tensor) -> Callable[[Sequence[int]], Steps]:
        width = head.config.hidden_size
        fused = head.fuse(torch.cat([hidden[layer, :, :width] for layer in plan["drafter"]["taps"]], dim=-1))

        def steps(context: Sequence[int]) -> Steps:
            tokens, read = list(context[1:]), fused[: len(context) - 1]
            while True:
                last = head(embed(tokens), read)[-1:]
                tokens.append((yield head.logits(last)[0]))
                read = torch.cat([read, last])

        return steps

    return ReferenceDrafter(EAGLE3, ids.tolist(), [head], begin)


@torch.no_grad()
def _hold(head: ReferenceHead, stored: StoredWeights) -> None:
    """Give a head the weights that a package contains."""
    parameters = dict(head.named_parameters())
    for name in {tensor.source.tensor for tensor in stored.part.tensors}:
        parameters[name.removeprefix(FOLDER).replace("layers.0.", "midlayer.")].copy_(stored(name))
