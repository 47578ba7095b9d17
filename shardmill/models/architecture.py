"""What a model is, as data: its numbers, what its layers are, and where the constants of its programs come from.

A family (families/*.py for decoders, encoders/*.py) writes such a description from a Hugging Face config; everything
else reads it and knows no family. `Graph`, `Kind` and `Ends` decide a program's graph, so together with the weights
they decide its bytes. Decoders and encoders have their layers in common: an encoder's layers see the tokens of a pass
where a decoder's see a cache, and it has `Ends` where a decoder has an LM head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

ROPE, LOCAL_ROPE = "rope", "rope_local"  # tables of rotary angles; the programs' inputs are named after them
PREFIX = "model."  # of transformers' names for all that is not the LM head
GENERATE, LABEL, CLASSIFY, EMBED = (  # tasks, as the hub calls them
    "text-generation", "token-classification", "text-classification", "feature-extraction",
)  # fmt: skip
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
    normed: bool = True  # whether its mixer has the norm that the graph puts before it


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
    norm: str = "rms"  # or "layer"
    norm_bias: bool = False
    gated: bool = True  # an MLP with a gate
    qk_norm: str = ""  # "before" or "after" the rotation, for each head; "wide": before, over all heads together
    pre_norms: bool = True  # a norm before each branch
    post_norms: bool = False  # a norm on each branch's output
    outer_norms: bool = False  # a norm on each sum of stream and branch, and none anywhere else
    activation: str = "silu"  # or "gelu_tanh", "gelu"
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
class Ends:
    """What an encoder's program has before its layers and after them, in the order of a pass."""

    embed_norm: bool = False  # on the host's rows
    final_norm: bool = False
    dense: str = ""  # the activation after a square projection; "" for no such projection
    dense_bias: bool = False
    dense_norm: bool = False
    labels: int = 0  # rows of the classifier; 0 where hidden states come out
    label_bias: bool = True


@dataclass(frozen=True)
class Architecture:
    """A whole model."""

    model_type: str
    graph: Graph
    kinds: tuple[Kind, ...]  # one for each layer
    vocab: int
    tied: bool  # the LM head is the embedding table
    ropes: Mapping[str, Rope]  # table name -> frequencies
    window: int | None = None  # positions that a sliding layer sees, its own included
    embedding_scale: float = 1.0  # the host's table is this many times the checkpoint's, the stream's scale included
    task: str = GENERATE
    ends: Ends | None = None  # of an encoder
    band: int | None = None  # positions that a token of an encoder's sliding layer sees on either side
    labels: tuple[str, ...] = ()  # the names of an encoder's labels, by row
    positions: int = 0  # rows of an encoder's table of positions, which the host adds
    types: int = 0  # rows of its table of segments, of which the host adds the first

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return len(self.kinds)

    @property
    def reach(self) -> int | None:
        """How many tokens to either side an encoder's output may depend on; None for all there are."""
        banded = self.band is not None and not self.positions and all(kind.mask == SLIDING_MASK for kind in self.kinds)
        return self.layers * self.band if banded and self.band is not None else None


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
    """A model and its checkpoint: `sources` says for the path of every constant where it comes from.

    Paths are "layers.I.ROLE" and what models/contract.py names besides.
    """

    architecture: Architecture
    sources: Mapping[str, Source]
    prefix: str = PREFIX  # begins the checkpoint's names where transformers' begin with "model."
    ignored: tuple[str, ...] = ()  # tensors that a checkpoint may hold and no program needs

    def under(self, prefix: str) -> Model:
        """The same model inside a larger one, whose checkpoint has its tensors under another prefix."""
        moved = {
            path: replace(source, tensor=prefix + source.tensor.removeprefix(self.prefix))
            for path, source in self.sources.items()
            if source.tensor.startswith(self.prefix)
        }
        return replace(self, sources={**self.sources, **moved}, prefix=prefix)
