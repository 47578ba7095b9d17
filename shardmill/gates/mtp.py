"""Qwen3.5's MTP layer out of transformers' modules, and the cases of its parts.

transformers does not read the layer's tensors. The layer and its norms are built like the model's, so the module here
joins transformers' modules as vLLM does; models/mtp.py lists the sources. The module's parameters have the checkpoint's
names after `mtp.`, and beside them are the model's last norm and its LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardmill.gates.case import Case, compared
from shardmill.gates.reference import ReferenceDrafter, Steps, checkpoint_weights
from shardmill.gates.stored import StoredWeights
from shardmill.models.hf_config import load_hf_config
from shardmill.models.interface import MTP
from shardmill.plan import Part


class ReferenceMtp(nn.Module):
    """An MTP layer in fp32; all its inputs and outputs have a row for each token of one text."""

    def __init__(self, config: Any, vocab: int) -> None:
        """Build the layer with transformers' initial weights.

        Args:
            config: transformers' config of a qwen3_5_text.
            vocab: how many tokens it drafts, the first ones of the model.
        """
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

        super().__init__()
        single, width, eps = copy(config), config.hidden_size, config.rms_norm_eps
        self.model_norm, self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            qwen3_5.Qwen3_5RMSNorm(width, eps) for _ in range(4)
        )
        self.fc = nn.Linear(2 * width, width, bias=False)
        single.num_hidden_layers, single.layer_types, single._attn_implementation = 1, ["full_attention"], "eager"
        self.layers = nn.ModuleList([qwen3_5.Qwen3_5DecoderLayer(single, 0)])
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.rotary = qwen3_5.Qwen3_5TextRotaryEmbedding(single)

    def join(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return what the layer reads of a token's embedding and a normed hidden state, each [n, d]."""
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(state)]
        joined: Tensor = self.fc(torch.cat(pair, dim=-1))
        return joined

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs [n, d] at positions 0 .. n - 1; a position sees itself and earlier ones."""
        count = len(x)
        turns = self.rotary(x[None], torch.arange(count)[None, None].expand(3, 1, count))
        mask = torch.full((count, count), torch.finfo(x.dtype).min).triu(1)[None, None]
        returned: Any = self.layers[0](x[None], position_embeddings=turns, attention_mask=mask)
        out: Tensor = (returned if isinstance(returned, Tensor) else returned[0])[0]
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab] of the layer's outputs [n, d]."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def _tensor_of(parameter: str, *, tied: bool) -> str:
    """Return transformers' name for the tensor of a parameter of ReferenceMtp."""
    shared = {"model_norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}
    if tied:
        shared["lm_head.weight"] = "model.embed_tokens.weight"
    return shared.get(parameter, f"{MTP}.{parameter}")


@torch.no_grad()
def load_mtp(source: Path, weights: Callable[[str], Tensor], vocab: int, *, tied: bool) -> ReferenceMtp:
    """Return the MTP layer of the checkpoint in a folder.

    Args:
        source: the folder.
        weights: returns its tensors by transformers' names.
        vocab: how many tokens it drafts, the first ones of the model.
        tied: whether the model's LM head is its embedding.
    """
    layer = ReferenceMtp(load_hf_config(source), vocab).eval().requires_grad_(False)
    for name, parameter in layer.named_parameters():
        parameter.copy_(weights(_tensor_of(name, tied=tied))[: len(parameter)].float())
    return layer


@torch.no_grad()
def mtp_case(
    part: Part, plan: Mapping[str, Any], known: Mapping[str, Tensor], source: Path, stored: StoredWeights
) -> Case:
    """Return the case of a part of an MTP layer: the text's pairs of a hidden state and the token after it.

    Args:
        part: the part.
        plan: plan.json's content.
        known: transformers' results for the text with the original weights: hidden [layers + 1, n, d].
        source: the checkpoint's folder.
        stored: the package's weights.
    """
    original, tied = checkpoint_weights(source, plan["prefix"]), plan["architecture"]["tied"]
    vocab = plan["drafter"]["vocab"]
    exact, packaged = (load_mtp(source, each, vocab, tied=tied) for each in (original, stored.over(original)))
    embedded, read = known["hidden"][0, 1:], known["hidden"][-1, :-1]
    x = exact.join(embedded, exact.model_norm(read))
    state = exact(x)
    # A draft's first step and its further steps, in turn: the host gives zeros for what the step lacks.
    first = torch.arange(len(x))[:, None] % 2 == 0
    pieces = torch.cat([embedded, torch.where(first, read, 0.0), torch.where(first, 0.0, state)], dim=-1)

    def joined(layer: ReferenceMtp, rows: Mapping[str, Tensor]) -> Tensor:
        embedded, read, state = rows["x"].chunk(3, dim=-1)
        return layer.join(embedded, layer.model_norm(read) + layer.norm(state))  # the norm of zeros is zero

    cases: dict[str, tuple[dict[str, Tensor], Callable[[ReferenceMtp, Mapping[str, Tensor]], Tensor]]] = {
        MTP: ({"x": pieces}, joined),
        "layers": ({"x": x}, lambda layer, rows: layer(rows["x"])),
        "head": ({"hidden": state}, lambda layer, rows: layer.logits(rows["hidden"])),
    }
    return compared(*cases[part.kind], packaged, exact)


def reference_mtp(
    plan: Mapping[str, Any], source: Path, all_stored: Iterable[StoredWeights], embed: Callable[[Sequence[int]], Tensor]
) -> ReferenceDrafter:
    """Return an MTP layer that drafts.

    Args:
        plan: plan.json's content.
        source: the checkpoint's folder.
        all_stored: the weights of the drafter's packages.
        embed: returns the model's embeddings of tokens, [n, d].
    """
    vocab, weights = plan["drafter"]["vocab"], checkpoint_weights(source, plan["prefix"])
    stored = reduce(lambda lookup, one: one.over(lookup), all_stored, weights)
    layer = load_mtp(source, stored, vocab, tied=plan["architecture"]["tied"])

    def begin(hidden: Tensor) -> Callable[[Sequence[int]], Steps]:
        normed = layer.model_norm(hidden[-1])

        def steps(context: Sequence[int]) -> Steps:
            x = layer.join(embed(context[1:]), normed[: len(context) - 1])
            while True:
                last = layer(x)[-1:]
                token = yield layer.logits(last)[0]
                x = torch.cat([x, layer.join(embed([token]), layer.norm(last))])

        return steps

    return ReferenceDrafter(MTP, range(vocab), [layer], begin)
