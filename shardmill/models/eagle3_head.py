"""An EAGLE-3 head out of transformers' modules: what training trains, and what gates compare a build's head with.

transformers does not know EAGLE-3. The layer of a head is a Llama layer whose attention reads twice the width. So the
module here is transformers' layer with other projections, joined as the published code joins them; eagle3.py lists the
sources. The module's parameters have the names of the published checkpoints.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from shardmill.models.eagle3 import TAPS


class Eagle3Head(nn.Module):
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
        fused: Tensor = self.fc(taps)
        return fused

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
        output: Tensor = y + layer.mlp(layer.post_attention_layernorm(y))
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, rows] of the layer's outputs [n, d]."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits
