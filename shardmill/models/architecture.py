"""What a decoder is, as data: its numbers, what its layers are, and where the constants of its programs come from.

A family (families/*.py) writes such a description from a Hugging Face config; everything else reads it and knows no
family. `Graph` and `Kind` decide a program's graph, so together with the weights they decide its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

ROPE, LOCAL_ROPE = "rope", "rope_local"  # tables of rotary angles; the programs' inputs are named after them
PREFIX = "model."  # of transformers' names for all that is not the LM head
MASK, SLIDING_MASK = "attn_mask", "attn_mask_sliding"


@dataclass(frozen=True)
class Rope:
    """Rotary embedding as the host computes it: angle(position, i) = position * inv_freq[i]."""

    inv_freq: tuple[float, ...]  # [rope_dim / 2], radians per position
    scale: float  # the attention factor of LongRoPE and YaRN: cos and sin are multiplied by it
    factors: str  # "default", "short" or "long": which list of LongRoPE's factors inv_freq was made from

    @property
    def dim(self) -> int:
        """Rotated dimensions of each head."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Kind:
    """What tells one layer's graph from another's in the same model; a layer's index does not."""

    mixer: str = "attention"  # or "conv", a short causal convolution
    rope: str | None = ROPE  # the table that its heads turn by; None for a layer without rotary embedding
    mask: str = MASK  # which positions its tokens see


@dataclass(frozen=True)
class Graph:
    """The numbers and options that all layers of a model share, and its head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    ffn: int
    rms_norm_eps: float
    fused: bool = False  # one projection for q, k and v, and one for gate and up
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""  # "before" or "after" the rotation, for each head; "wide": before, over all heads together
    pre_norms: bool = True  # a norm before each branch
    post_norms: bool = False  # a norm on each branch's output
    activation: str = "silu"  # or "gelu_tanh"
    attention_scale: float = 0.0  # of the scores; 0 stands for head_dim ** -0.5
    score_cap: float = 0.0  # c * tanh(score / c); 0 for none
    logit_cap: float = 0.0
    logit_scale: float = 1.0
    branch_scale: float = 1.0  # of what a branch adds to the residual stream
    stream_scale: float = 1.0  # the residual stream is this many times the model's, to stay in the range of fp16
    conv_taps: int = 0  # of a short convolution: this token and conv_taps - 1 before it

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def stream_eps(self) -> float:
        """The epsilon of norms that read the residual stream."""
        return self.rms_norm_eps * self.stream_scale**2


@dataclass(frozen=True)
class Architecture:
    """A whole decoder."""

    model_type: str
    graph: Graph
    kinds: tuple[Kind, ...]  # one for each layer
    vocab: int
    tied: bool  # the LM head is the embedding table
    ropes: Mapping[str, Rope]  # table name -> frequencies
    window: int | None = None  # positions that a sliding layer sees, its own included
    embedding_scale: float = 1.0  # the host's table is this many times the checkpoint's, the stream's scale included

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return len(self.kinds)


@dataclass(frozen=True)
class Source:
    """Where a constant comes from: a checkpoint's tensor, (value + add) * times, row by row."""

    tensor: str
    add: float = 0.0
    times: float = 1.0
    column: int | None = None  # only this one of the columns of a row
    shape: tuple[int, ...] | None = None  # the tensor's, where it is not the constant's

    def original(self, values: Any) -> Any:
        """The checkpoint's values, given a constant's."""
        return values / self.times - self.add


@dataclass(frozen=True)
class Model:
    """A decoder and its checkpoint: `sources` says for the path of every constant where it comes from.

    Paths are "layers.I.ROLE", "norm.weight", "lm_head.weight" and "embedding".
    """

    architecture: Architecture
    sources: Mapping[str, Source]
    prefix: str = PREFIX  # begins the checkpoint's names where transformers' begin with "model."
    ignored: tuple[str, ...] = ()  # tensors that a checkpoint may hold and no program needs

    def under(self, prefix: str) -> Model:
        """The same decoder inside a larger model, whose checkpoint has its tensors under another prefix."""
        moved = {
            path: replace(source, tensor=prefix + source.tensor.removeprefix(self.prefix))
            for path, source in self.sources.items()
            if source.tensor.startswith(self.prefix)
        }
        return replace(self, sources={**self.sources, **moved}, prefix=prefix)
