"""A model as data: its numbers, the kinds of its layers, and the checkpoint tensors behind its programs' constants.

A family (families/*.py for decoders, encoders/*.py) writes such a description from a Hugging Face config; everything
else reads it and knows no family. `Graph`, `LayerSpec` and `EncoderIO` decide a program's graph, so together with the
weights they decide its bytes. Decoders and encoders share the same layers. An encoder's layers see the tokens of a
pass, while a decoder's layers see a cache. An encoder has `EncoderIO` in place of an LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardmill.errors import CheckpointError
from shardmill.models.recurrences import RECURRENCES, DeltaNet, Mamba2, Recurrence, RgLru

if TYPE_CHECKING:
    from shardmill.models.tower import TowerArchitecture

ROPE, LOCAL_ROPE = "rope", "rope_local"  # tables of rotary angles; the programs' inputs are named after them
PREFIX, HEAD = "model.", "lm_head."  # of transformers' names: all but the LM head, and the LM head
EMBEDDING = "embed_tokens.weight"  # ends the name of a decoder's table
GENERATE, LABEL, CLASSIFY, EMBED, RANK = (  # tasks, as the hub calls them
    "text-generation", "token-classification", "text-classification", "feature-extraction", "text-ranking",
)  # fmt: skip
MASK, SLIDING_MASK = "attn_mask", "attn_mask_sliding"
OF_TOWER = "tower."  # begins the paths of a tower's constants in the model
SILU, SILU_TANH = "silu", "silu_tanh"  # activations of models/primitives.py: one function, in two spellings
XIELU = "xielu"  # an activation with two learned numbers


@dataclass(frozen=True)
class Rope:
    """Rotary embedding as the host computes it: angle(position, i) = position * inv_freq[i]."""

    inv_freq: tuple[float, ...]  # [rope_dim / 2], radians per position
    scale: float  # the attention factor of LongRoPE and YaRN: cos and sin are multiplied by it
    factors: str  # "default", "short" or "long": which list of LongRoPE's factors inv_freq was made from

    @property
    def dim(self) -> int:
        """Return rotated dimensions of each head."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of an MLP, and the router that chooses among them (models/mixture.py)."""

    count: int
    chosen: int  # for each token
    ffn: int  # width of one expert
    scores: str = "softmax"  # how the router's logits become weights: or "sigmoid", or "sparsemixer"
    normalised: bool = True  # the weights of the chosen ones add up to 1
    normal_eps: float = 0.0  # added to that sum, where the scores are sigmoids
    choice_bias: bool = False  # numbers of the checkpoint are added to the scores for the choice, not for the weights
    scale: float = 1.0  # of the weights
    jitter: float = 0.0  # SparseMixer's eps
    skips: bool = False  # one more class that stands for no expert
    router: str = "linear"  # or "mlp", ZAYA's
    router_width: int = 0  # of the router's own hidden state, where it has one
    router_bias: bool = False
    biases: bool = False  # of the experts' projections
    swiglu_alpha: float = 0.0  # gate * sigmoid(alpha * gate) * (up + 1), both within swiglu_limit; 0 for a plain one
    swiglu_limit: float = 0.0
    beside: bool = False  # an MLP of the graph's width is in the layer too, and its output is added to theirs
    beside_gate: bool = False  # and that output is multiplied by the sigmoid of one row's product with the input
    group: int = 1  # experts whose projections are one matrix
    routed: bool = False  # the experts are separate programs, which the host calls for the tokens that take them

    @property
    def classes(self) -> int:
        """Return how many logits the router has."""
        return self.count + self.skips


@dataclass(frozen=True)
class LayerSpec:
    """The options that tell the graphs of a model's layers apart; a layer's index does not change its graph."""

    mixer: str = "attention"  # or another of models/mixers.py; or "", no mixer
    rope: str | None = ROPE  # the rotary table that turns its heads; None for a layer without rotary embedding
    mask: str = MASK  # which positions its tokens see
    normed: bool = True  # whether its mixer has the norm that the graph puts before it
    paired: bool = False  # its mixer reads a token's embedding too, which lies before the stream; each has a norm
    norm_before_residual: bool = False  # the branches of a paired layer are added to the norm of the stream
    ffn: str = "mlp"  # or "experts"; or "", no feed-forward block
    carries: bool = False  # its router adds the router state of the layer before
    head_dim: int = 0  # of its heads; 0 stands for the graph's, also in the next two
    kv_heads: int = 0
    rope_dim: int = 0
    wide: int = 1  # its MLP is this many times as wide as the graph's
    key_is_value: bool = False  # no projection for values, which are the keys before their norm and rotation
    shares: bool = False  # keeps no cache and reads the cache of an earlier layer, see `cache_source`

    @property
    def attends(self) -> bool:
        """Return whether its mixer looks at keys and values, by a mask."""
        return self.mixer in ("attention", "cca")

    @property
    def recurs(self) -> bool:
        """Return whether its mixer is a recurrence."""
        return self.mixer in RECURRENCES


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
    gated: bool = True  # an MLP with a gate
    qk_norm: str = ""  # "before" or "after" the rotation, for each head; "wide": before, over all heads together
    pre_norms: bool = True  # a norm before each branch
    post_norms: bool = False  # a norm on each branch's output
    parallel: bool = False  # both branches read one norm of the stream, and the stream is added to their sum
    outer_norms: bool = False  # a norm on each sum of stream and branch, and none anywhere else
    activation: str = "silu"  # or another of models/primitives.py
    attention_scale: float = 0.0  # of the scores; 0 stands for head_dim ** -0.5
    score_cap: float = 0.0  # c * tanh(score / c); 0 for none
    logit_cap: float = 0.0
    logit_scale: float = 1.0
    branch_scale: float = 1.0  # of what a branch adds to the residual stream
    stream_scale: float = 1.0  # the residual stream is this many times the model's, to stay in the range of fp16
    output_scale: float = 1.0  # what the projections that write to the stream read is this many times the model's
    conv_taps: int = 0  # of a short convolution: this token and conv_taps - 1 before it
    norm: str = "rms"  # or "layer": LayerNorm
    norm_bias: bool = True  # of LayerNorms
    head_bias: bool = False
    sinks: bool = False  # a logit for each head that takes its share of the softmax and gives nothing
    residual_scales: bool = False  # (branch + bias) * scale + (stream + bias) * scale, four vectors a branch
    experts: Experts | None = None  # of the layers that have them
    value_norm: bool = False  # an RMSNorm without gain on each head of the value
    per_layer: int = 0  # width of a token's row for each layer; 0 without such rows
    per_layer_eps: float = 0.0  # of the norm on the token's projected embedding
    per_layer_table: bool = True  # such a row is this norm plus a row of the host's second table; False: the norm alone
    layer_scale: bool = False  # the residual stream is multiplied by a number of the checkpoint after each layer
    output_gate: bool = False  # the heads' output is multiplied by the sigmoid of one more projection
    # Of the layers that are a recurrence of a kind, by the names of models/recurrences.py:
    delta: DeltaNet | None = None
    mamba: Mamba2 | None = None
    rg_lru: RgLru | None = None

    def of(self, kind: LayerSpec) -> Graph:
        """Return the graph as a layer of this kind sees it, with the layer's own sizes."""
        return replace(
            self,
            head_dim=kind.head_dim or self.head_dim,
            kv_heads=kind.kv_heads or self.kv_heads,
            rope_dim=kind.rope_dim or self.rope_dim,
            ffn=self.ffn * kind.wide,
        )

    @property
    def group(self) -> int:
        """Return query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def carry(self) -> int:
        """Return channels that a token carries from layer to layer beside the residual stream: the router's state."""
        return self.experts.router_width if self.experts and self.experts.router == "mlp" else 0

    @property
    def recurrence(self) -> Recurrence | None:
        """Return the sizes of the layers that are a recurrence; a model has one kind at most."""
        return next((sizes for name in RECURRENCES if (sizes := getattr(self, name))), None)

    @property
    def stream_eps(self) -> float:
        """Return the epsilon of norms that read the residual stream."""
        return self.rms_norm_eps * self.stream_scale**2


@dataclass(frozen=True)
class EncoderIO:
    """The options of an encoder's program before and after its layers, in the order of a pass."""

    embed_norm: bool = False  # on the host's rows
    final_norm: bool = False
    dense: str = ""  # the activation after a square projection; "" if the program lacks this projection
    dense_bias: bool = False
    dense_norm: bool = False
    labels: int = 0  # rows of the classifier; 0 where hidden states come out
    label_bias: bool = True
    project: int = 0  # width of the hidden states that come out, after a projection; 0 without this projection


@dataclass(frozen=True)
class Architecture:
    """A whole model."""

    model_type: str
    graph: Graph
    kinds: tuple[LayerSpec, ...]  # one for each layer
    vocab: int
    tied: bool  # the LM head is the embedding table
    ropes: Mapping[str, Rope]  # table name -> frequencies
    window: int | None = None  # positions that a sliding layer sees, its own included
    embedding_scale: float = 1.0  # the host's table is this many times the checkpoint's, the stream's scale included
    task: str = GENERATE
    ends: EncoderIO | None = None  # of an encoder
    band: int | None = None  # positions that a token of an encoder's sliding layer sees on either side
    labels: tuple[str, ...] = ()  # the names of an encoder's labels, by row
    positions: int = 0  # rows of an encoder's table of positions, which the host adds
    types: int = 0  # rows of the encoder's table of segments; the host adds the first row
    causal: bool = False  # whether an encoder's tokens see no later token
    template: str = ""  # how an encoder that ranks is asked, with {instruction}, {query} and {document}
    instruction: str = ""  # the instruction of a request that has none
    tower: TowerArchitecture | None = None  # of a model that is built with images

    @property
    def layers(self) -> int:
        """Return how many layers it has."""
        return len(self.kinds)

    @property
    def reach(self) -> int | None:
        """Return how many tokens to either side an encoder's output may depend on; None for all tokens."""
        banded = self.band is not None and not self.positions and all(kind.mask == SLIDING_MASK for kind in self.kinds)
        return self.layers * self.band if banded and self.band is not None else None


@dataclass(frozen=True)
class TensorSource:
    """The origin of a constant, or of a block of its rows or columns: (value + add) * times of a tensor's rows.

    First a matrix is taken out of the tensor, then rows of the matrix; see models/sources.py.
    """

    tensor: str
    add: float = 0.0
    times: float = 1.0
    index: int | None = None  # only this matrix of a stack of matrices [n, rows, columns]
    column: int | None = None  # only this column along the last axis
    transposed: bool = False  # the checkpoint has the matrix as [columns, rows]
    rows: tuple[int, int, int] | None = None  # only these rows: first, stop, step
    repeat: int = 1  # how many times every row is repeated
    magnitude: str = ""  # "divide": by the matrix' magnitude, a power of two; "only": the magnitude is the one row
    plus: str = ""  # a tensor with a number for each column, which is added first
    by: str = ""  # a tensor with a number for each column, the factor of this column in every row
    softplus: bool = False  # log(1 + exp(value)) is taken of the tensor's values first
    exp: bool = False  # or exp(value)
    shape: tuple[int, ...] | None = None  # the tensor's shape, if it is not the constant's

    def read_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that is read from a tensor of this shape: one matrix of a stack, or the whole tensor."""
        return shape if self.index is None else shape[1:]

    def block_shape(self, read: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the block that is made of values of shape `read`."""
        if self.magnitude == "only":
            return (self.repeat,)
        shape = read if self.column is None else tuple(extent for extent in read[:-1] if extent > 1)
        if self.transposed:
            shape = shape[::-1]
        count = shape[0] if self.rows is None else len(range(*self.rows))
        return (count * self.repeat, *shape[1:])


Sources = (
    TensorSource | tuple[TensorSource, ...]
)  # blocks, under each other or side by side, whichever the constant's shape says


@dataclass(frozen=True)
class ModelDescription:
    """A model and its checkpoint: `sources` maps the path of every constant to its tensors in the checkpoint.

    Paths are "layers.I.ROLE" and the other paths that models/contract.py defines.
    """

    architecture: Architecture
    sources: Mapping[str, Sources]
    prefix: str = PREFIX  # begins the checkpoint's names where transformers' begin with "model."
    ignored: tuple[str, ...] = ()  # tensors that a checkpoint may hold and no program needs
    fixed: Mapping[str, float] = field(default_factory=dict)  # tensors without axes, each with its value in any program
    foreign: Mapping[str, str] = field(default_factory=dict)  # part of a tensor's name -> why it is refused
    others: Mapping[str, Sources] = field(default_factory=dict)  # take the place of `sources` that a checkpoint lacks

    def stored_as(self, tensors: Collection[str]) -> ModelDescription:
        """Return the same model by the names of a checkpoint's tensors: under its prefix, and in its layout."""
        renamed_model = self.under(prefix_of(tensors, self.prefix))
        stored = {
            path: each
            for path, each in renamed_model.others.items()
            if all(one.tensor in tensors for one in blocks(each))
        }
        return replace(renamed_model, sources={**renamed_model.sources, **stored}, others={})

    def under(self, prefix: str) -> ModelDescription:
        """Return the same model inside a larger one, whose checkpoint has its tensors under another prefix."""
        if prefix == self.prefix:
            return self

        def moved(name: str) -> str:
            return name_under(prefix, name_in_tower(self.prefix, name))

        sources, others = (
            {
                path: tensor_sources if path.startswith(OF_TOWER) else all_renamed(tensor_sources, moved)
                for path, tensor_sources in each.items()
            }
            for each in (self.sources, self.others)
        )
        fixed = {moved(name): value for name, value in self.fixed.items()}
        ignored = tuple(map(moved, self.ignored))
        return replace(self, sources=sources, prefix=prefix, ignored=ignored, fixed=fixed, others=others)


def prefix_of(tensors: Iterable[str], usual: str) -> str:
    """Return the prefix of a decoder's tensor names, as the name of its embedding shows it.

    In a larger model the embedding has a longer prefix.
    """
    prefixes = [name.removesuffix(EMBEDDING) for name in tensors if name.endswith(EMBEDDING)]
    return prefixes[0] if len(prefixes) == 1 else usual


def name_under(prefix: str, name: str) -> str:
    """Return a checkpoint's name of a tensor.

    Args:
        prefix: begins the checkpoint's names where transformers' begin with "model.". If it ends in ".model.", the
            decoder lies in another module, and the LM head lies beside the decoder: "language_model.model." has
            "language_model.lm_head.weight", and "model.language_model." has "lm_head.weight".
        name: transformers' name in a model that is only a decoder.
    """
    if name.startswith(PREFIX):
        return prefix + name.removeprefix(PREFIX)
    return _outer(prefix) + name if name.startswith(HEAD) else name


def name_in_tower(prefix: str, name: str) -> str:
    """Return transformers' name of a tensor, given the checkpoint's name: the inverse of `name_under`."""
    if name.startswith(prefix):
        return PREFIX + name.removeprefix(prefix)
    inner = name.removeprefix(_outer(prefix))
    return inner if inner.startswith(HEAD) else name


def _outer(prefix: str) -> str:
    """Return the prefix of the module in which a decoder lies beside its LM head; "" if nothing is around them."""
    return prefix.removesuffix(PREFIX) if prefix.endswith(f".{PREFIX}") else ""


def blocks(sources: Sources) -> tuple[TensorSource, ...]:
    """Return the blocks of a constant; most constants have one block."""
    return (sources,) if isinstance(sources, TensorSource) else sources


def cache_source(layers: Sequence[tuple[int, LayerSpec]], index: int) -> int | None:
    """Return the layer whose cache a layer reads; None if `layers` lacks it.

    A layer that does not share reads its own cache. A layer that shares reads the cache of the last earlier layer that
    has a cache and the same mask, rotary table and heads.

    Args:
        layers: consecutive layers by their index in the model.
        index: one of them.
    """
    kinds = dict(layers)
    wanted = kinds[index]
    if not wanted.shares:
        return index
    alike = replace(wanted, shares=False, wide=1)
    earlier = [i for i, kind in layers if i < index and replace(kind, wide=1) == alike]
    return earlier[-1] if earlier else None


def joints(kinds: Sequence[LayerSpec]) -> list[int]:
    """Return the layers at which a part may begin, and the number of layers: no layer shares a cache across these."""
    layers = tuple(enumerate(kinds))
    read = [(cache_source(layers, i), i) for i, kind in layers if kind.shares]
    spans = [(source, reader) for source, reader in read if source is not None]
    return [at for at in range(len(kinds) + 1) if not any(source < at <= reader for source, reader in spans)]


def with_experts(a: Architecture, *, routed: bool) -> Architecture:
    """Return the same model with its experts in separate programs, or in the layers' programs.

    Raises:
        CheckpointError: for a model without experts.
    """
    if a.graph.experts is None:
        raise CheckpointError(f"experts: {a.model_type} has none; leave `experts` out of the config")
    return replace(a, graph=replace(a.graph, experts=replace(a.graph.experts, routed=routed)))


def with_tanh(a: Architecture) -> Architecture:
    """Return the same model with every SiLU computed from tanh.

    Raises:
        CheckpointError: for a model without SiLU.
    """
    ends = a.ends
    if SILU not in (a.graph.activation, ends.dense if ends else ""):
        raise CheckpointError(f"program.silu: {a.model_type} has no SiLU; leave `silu` out of the config")
    if ends and ends.dense == SILU:
        ends = replace(ends, dense=SILU_TANH)
    activation = SILU_TANH if a.graph.activation == SILU else a.graph.activation
    return replace(a, graph=replace(a.graph, activation=activation), ends=ends)


def renamed(source: TensorSource, name: Callable[[str], str]) -> TensorSource:
    """Return a source whose tensors have other names."""
    plus, by = (name(vector) if vector else "" for vector in (source.plus, source.by))
    return replace(source, tensor=name(source.tensor), plus=plus, by=by)


def all_renamed(sources: Sources, name: Callable[[str], str]) -> Sources:
    """Return a constant's sources whose tensors have other names."""
    return renamed(sources, name) if isinstance(sources, TensorSource) else tuple(renamed(one, name) for one in sources)
