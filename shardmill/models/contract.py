"""The graph contract: what goes into each kind of program, what it keeps, and what comes out.

A model is a chain of parts, and a part has a kind:

    kind    in                                                          states               out
    layers  x [1, d, T, 1]                                              k_i, v_i, c_i        hidden [1, d, T, 1]
            rope_cos, rope_sin [T, rope_dim / 2], rope_*_local
            attn_mask [1, 1, T, S], attn_mask_sliding [1, 1, T, W]
            kv_write_mask [1, 1, S, T], kv_write_mask_sliding [1, 1, W, T]
            conv_write_mask [1, 1, T, R], conv_read_mask [1, L - 1, R, T]
    experts x [1, d, T, 1], weights [1, experts, T, 1]                  none                 hidden [1, d, T, 1]
    head    hidden [1, d, T, 1]                                         none                 logits [1, rows, T, 1]
    encoder x [1, d, T, 1]                                              none                 logits [1, rows, T, 1]
            rope_cos, rope_sin [T, rope_dim / 2], rope_*_local                               or hidden [1, d, T, 1]
            attn_mask [1, 1, T, T], attn_mask_sliding [1, 1, T, T]

Which of the inputs a part has follows from the kinds of its layers. d is the hidden width, S the key/value slots, W
those of a sliding layer, R the slots of a convolution's ring, L its taps; every input carries T, the tokens of a pass.
What a token carries from part to part beside the residual stream, a router's state, lies in channels of x and hidden
after the first d; the host gives the first part zeros there.

Where the host routes to experts, a part of layers ends in the middle of a layer that has some. Its `hidden` then has
the channels of x, where the residual stream lacks only what the experts add; after them the experts' input z, d
channels; and after that the weight of each expert, 0 where the token does not take it. Parts of kind "experts" follow,
each with some of that layer's experts, in order: from z, its x, and those experts' weights one makes what they add to
the stream, every multiplier of the branch included. The host adds what they make to the stream and hands it to the next
part of layers. It need not call a part whose experts no token of the pass takes.

An encoder is one part of kind "encoder" for each number
of tokens that it is built for (a bucket): there T is that number, and its tokens see one another through the masks.

No program has an index that depends on data: the host says by masks what is written and what is seen. Token t sees slot
s if and only if s was last written with a position that is not after t's, so a rejected draft costs nothing: its slots
are hidden by their positions until they are written again.

Where its window is short enough, a sliding layer keeps no more than it sees: W slots as a ring, position p in slot
p mod W. Else W is S, its slots are those of the other layers, and there is no kv_write_mask_sliding.

A program may also have no states (GraphSpec.hosted). Then k_i, v_i and c_i are inputs, of the states' shapes. The
program writes the new tokens into its copies by the same masks, sees them there, and gives what they add as further
outputs, which the host writes into the caches that it keeps: k_i_new, v_i_new [1, kv_heads, T, head_dim], c_i_new
[1, 1, ., T].

The weights of a layer stand in models/layer_constants.py. This file spells out all else; conversion, engine, gates and
manifest ask it. How the host computes the masks and the rotary rows of a pass stands in models/host.py, and for
encoders in models/buckets.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardmill.models.architecture import SLIDING_MASK, Architecture, EncoderIO, Graph, LayerSpec
from shardmill.models.layer_constants import (
    Shape,
    cca_widths,
    group_constants,
    layer_constants,
    mixer_constants,
    norm_constants,
    projection_constants,
)

T = -1  # stands for the token axis in shapes
CACHE_ITEM_BYTES = 2  # states and the host's caches are fp16
RING = 32  # slots of a convolution's ring: the narrowest state that the Neural Engine takes (rule S8)
ORDER = "order"  # the constant that falls from expert to expert, see models/routing.py
LABEL_STEP = 16  # coremltools keeps arrays of fewer than 10 elements outside the weight file
WINDOW_STEP = 32  # a ring of a sliding layer is a multiple of this


@dataclass(frozen=True)
class GraphSpec:
    """All that decides what a part's program is made of, and so its interface."""

    kind: str  # "layers", "experts", "head" or "encoder"
    graph: Graph
    layers: tuple[tuple[int, LayerSpec], ...] = ()  # absolute index and kind of each layer
    slots: int = 0  # S
    window_slots: int = 0  # W where sliding layers keep rings; 0 where they keep as much as the others
    rows: int = 0  # of the vocabulary, or experts
    ends: EncoderIO | None = None  # of an encoder
    hosted: bool = False  # whether the host keeps what states would hold

    @property
    def ropes(self) -> tuple[str, ...]:
        """Return the rotary tables that its layers use, sorted."""
        return tuple(sorted({kind.rope for _, kind in self.layers if kind.mixer != "conv" and kind.rope}))

    @property
    def masks(self) -> tuple[str, ...]:
        """Return the attention masks that its layers use, sorted."""
        return tuple(sorted({kind.mask for _, kind in self.layers if kind.mixer != "conv"}))

    @property
    def label_rows(self) -> int:
        """Return rows of an encoder's logits.

        Its labels and, up to a multiple of LABEL_STEP, the first of them once more.
        """
        return -(-self.ends.labels // LABEL_STEP) * LABEL_STEP if self.ends else 0

    def kept(self, mask: str) -> int:
        """Return key/value slots of layers with an attention mask; of an encoder, the tokens of the pass."""
        if self.kind == "encoder":
            return T
        return self.window_slots if mask == SLIDING_MASK and self.window_slots else self.slots

    def write_mask(self, mask: str) -> str:
        """Return the input that says where layers with an attention mask write."""
        return "kv_write_mask_sliding" if mask == SLIDING_MASK and self.window_slots else "kv_write_mask"

    @property
    def ends_in_experts(self) -> bool:
        """Return whether it ends in the middle of a layer, where the host routes to experts."""
        experts = self.graph.experts
        ends = self.kind == "layers" and bool(self.layers) and self.layers[-1][1].ffn == "experts"
        return ends and experts is not None and experts.routed

    @property
    def convolves(self) -> bool:
        """Return whether any layer has convolutions."""
        return any(kind.mixer != "attention" for _, kind in self.layers)

    @property
    def routes(self) -> bool:
        """Return whether any layer has a router."""
        return any(kind.ffn == "experts" for _, kind in self.layers)


def window_slots(window: int | None, tokens: int, slots: int) -> int:
    """Return slots of a sliding layer's ring, or 0 where that would not be fewer than there are.

    A pass writes up to `tokens` positions before the first of them looks `window` - 1 positions back, and a draft that
    is rejected leaves one more than that to be looked at.
    """
    needed = -(-((window or slots) - 1 + tokens) // WINDOW_STEP) * WINDOW_STEP
    return needed if needed < slots else 0


def most_tokens(taps: int) -> int:
    """Return the most tokens of a pass whose first token still finds the `taps` - 1 before it in the ring."""
    return RING - taps + 1


def inputs(blueprint: GraphSpec) -> dict[str, Shape]:
    """Return the inputs of a program by name, in order; T stands for the token axis."""
    g = blueprint.graph
    if blueprint.kind == "head":
        return {"hidden": (1, g.hidden + g.carry, T, 1)}
    if blueprint.kind == "experts":
        return {"x": (1, g.hidden, T, 1), "weights": (1, blueprint.rows, T, 1)}
    found: dict[str, Shape] = {"x": (1, g.hidden + g.carry, T, 1)}
    for name in blueprint.ropes:
        cos, sin = rope_inputs(name)
        found |= {cos: (T, g.rope_dim // 2), sin: (T, g.rope_dim // 2)}
    found |= {name: (1, 1, T, blueprint.kept(name)) for name in blueprint.masks}
    if blueprint.kind == "encoder":
        return found
    found |= {blueprint.write_mask(name): (1, 1, blueprint.kept(name), T) for name in blueprint.masks}
    if blueprint.convolves:
        found |= {"conv_write_mask": (1, 1, T, RING), "conv_read_mask": (1, g.conv_taps - 1, RING, T)}
    return found | (caches(blueprint) if blueprint.hosted else {})


def rope_inputs(table: str) -> tuple[str, str]:
    """Return the names of the inputs for the cosines and sines of a rotary table: rope -> rope_cos, rope_sin."""
    stem, _, rest = table.partition("_")
    return (f"{stem}_cos_{rest}", f"{stem}_sin_{rest}") if rest else (f"{stem}_cos", f"{stem}_sin")


def states(blueprint: GraphSpec) -> dict[str, Shape]:
    """Return the states of a program by name, in order; none where the host keeps what they would hold."""
    return {} if blueprint.hosted else caches(blueprint)


def new_rows(blueprint: GraphSpec) -> dict[str, Shape]:
    """Return the further outputs of a program whose caches the host keeps: what its tokens add to each, in order.

    What token t adds belongs where the write mask of its layer says that it is written.
    """
    if not blueprint.hosted:
        return {}
    return {
        new_name(name): (*shape[:3], T) if name.startswith("c_") else (*shape[:2], T, shape[3])
        for name, shape in caches(blueprint).items()
    }


def new_name(cache: str) -> str:
    """Return the output with what a pass adds to a cache."""
    return f"{cache}_new"


def caches(blueprint: GraphSpec) -> dict[str, Shape]:
    """Return what is kept from pass to pass by name, in order: k_i and v_i of attention layers, c_i of convolutions."""
    if blueprint.kind not in ("layers", "encoder"):
        return {}
    g = blueprint.graph
    found: dict[str, Shape] = {}
    for i, kind in () if blueprint.kind == "encoder" else blueprint.layers:
        if kind.mixer != "conv":
            found |= {f"{name}_{i}": (1, g.kv_heads, blueprint.kept(kind.mask), g.head_dim) for name in "kv"}
        if kind.mixer != "attention":
            found[f"c_{i}"] = (1, 1, g.hidden if kind.mixer == "conv" else sum(cca_widths(g)), RING)
    return found


def cache_bytes(blueprint: GraphSpec) -> int:
    """Return the bytes of all that is kept from pass to pass."""
    return sum(CACHE_ITEM_BYTES * prod(shape) for shape in caches(blueprint).values())


def output(blueprint: GraphSpec) -> str:
    """Return the name of a program's one output."""
    return "logits" if blueprint.kind == "head" or blueprint.label_rows else "hidden"


def constants(blueprint: GraphSpec) -> dict[str, Shape]:
    """Return the weights of a program by their path in it, in order, with their shapes."""
    g = blueprint.graph
    if blueprint.kind == "head":
        return norm_constants("norm", g) | projection_constants("lm_head", blueprint.rows, g.hidden, g.head_bias)
    if blueprint.kind == "experts":
        return group_constants(g, blueprint.rows)
    layers = {
        f"layers.{i}.{role}": shape for i, kind in blueprint.layers for role, shape in mixer_constants(g, kind).items()
    }
    return layers if blueprint.ends is None else _around(layers, blueprint, blueprint.ends)


def _around(layers: Mapping[str, Shape], blueprint: GraphSpec, ends: EncoderIO) -> dict[str, Shape]:
    """Return the weights of an encoder's program, given those of its layers."""
    g, found = blueprint.graph, dict(layers)
    if ends.embed_norm:
        found = norm_constants("embed_norm", g) | found
    if ends.final_norm:
        found |= norm_constants("norm", g)
    if ends.dense:
        found |= projection_constants("dense", g.hidden, g.hidden, ends.dense_bias)
    if ends.dense_norm:
        found |= norm_constants("dense_norm", g)
    return found | (
        projection_constants("classifier", blueprint.label_rows, g.hidden, ends.label_bias) if ends.labels else {}
    )


def whole_blueprint(a: Architecture) -> GraphSpec:
    """Return the spec of a program with all layers; for an encoder, this is the spec of each part."""
    layers = tuple(enumerate(a.kinds))
    return GraphSpec("encoder", a.graph, layers, ends=a.ends) if a.ends else GraphSpec("layers", a.graph, layers)


def table_constants(a: Architecture) -> dict[str, Shape]:
    """Return the host's tables by path, with their shapes."""
    found: dict[str, Shape] = {"embedding": (a.vocab, a.graph.hidden)}
    named = {"positions": a.positions, "types": a.types}
    return found | {path: (rows, a.graph.hidden) for path, rows in named.items() if rows}


def model_constants(a: Architecture) -> dict[str, Shape]:
    """Return the weights of all programs and the host's tables by path, with their shapes."""
    head = {} if a.ends else constants(GraphSpec("head", a.graph, rows=a.vocab))
    layers = {
        f"layers.{i}.{role}": shape
        for i, kind in enumerate(a.kinds)
        for role, shape in layer_constants(a.graph, kind).items()
    }
    return constants(whole_blueprint(a)) | layers | head | table_constants(a)


def computed(blueprint: GraphSpec) -> dict[str, tuple[float, ...]]:
    """Return constants that no checkpoint decides, by their path."""
    if not blueprint.routes or blueprint.graph.experts is None:
        return {}
    return {ORDER: tuple(float(n) for n in range(blueprint.graph.experts.classes, 0, -1))}


def stem(path: str) -> str:
    """Return what coremltools calls a constant: its path in the PyTorch module, spelled as an identifier."""
    return path.replace(".", "_")
