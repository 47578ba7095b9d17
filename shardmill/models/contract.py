"""The graph contract: what goes into each kind of program, what it keeps, and what comes out.

A model is a chain of parts, and a part has a kind: part_kinds.py lists the kinds, with the inputs and outputs of each.
The kinds of a part's layers decide which inputs it has.

A drafter's programs are parts too, called apart from the model's own chain. They read taps: the hidden states of the
model at the inputs of n of its layers. A tap within a part is a further output of the part, tap_i [1, d, T, 1]. A tap
between two parts is the second part's x, which the host has already. A layer of a drafter may be paired: its
x [1, 2 d, T, 1] has a token's embedding before the stream. A drafter may keep no caches. It then takes k_i and v_i of
some layers of the model, which are lent: the host holds them (GraphSpec.hosted), and the drafter's part writes nothing
into them.

d is the hidden width, S the number of key/value slots, and W the number of slots of a sliding layer. R is the number of
slots of a convolution's ring, and L its number of taps. Every input but the host's caches and an adapter's matrices
carries T, the tokens of a pass. Beside the residual stream, a token may carry a router's state from part to part. This
state lies in the channels of x and hidden after the first d; the host gives the first part zeros there.

If the host routes to experts, a part of layers ends in the middle of a layer with experts. Its `hidden` then has the
channels of x, where the residual stream lacks only the experts' output. After these channels come the experts' input z,
d channels, and the weight of each expert, which is 0 if the token does not take the expert. Parts of kind "experts"
follow, each with some of that layer's experts, in order. Such a part takes z as its x, and the weights of its experts.
It returns what these experts add to the stream, including every multiplier of the branch. The host adds the outputs of
these parts to the stream and hands the stream to the next part of layers. It need not call a part if no token of the
pass takes one of its experts.

A layer may share: then it has no cache and reads the keys and values of an earlier layer of its part. If the host keeps
the caches, a part in which every layer shares may read caches of earlier parts. These caches are lent as above, and the
pass' own tokens are already in them. Such a part keeps nothing, so a pass that needs no logits may leave it out. Layers
may have heads of different sizes, and so may their caches and rotary rows.

A model may have a second table with a row of P numbers for each token and layer. Its parts of layers then take p_i, the
tokens' rows for layer i, and `embedded`, which is the first part's x: the tokens' rows of the embedding.

If a config asks for adapters, the matrices of an adapter are inputs of the parts of layers, see models/adapters.py.
They stay the same from pass to pass, and do not carry T.

An encoder has a chain of parts of kind "encoder" for each bucket, a number of tokens; usually one part has all layers.
In these parts T is the bucket, and the tokens see one another through the masks. A part's `hidden` is the next part's
x. The last hidden states may be projected to another width than d (EncoderIO). If its layers have rows of P numbers,
there is no second table: they are projections of the first part's x, which later parts take as `embedded`.

A tower turns the patches of an image into rows of the decoder's width: models/tower.py has its inputs. It has a part of
kind "tower" for each bucket, a number of patches, which is T there. A pass of the model leaves these parts out.

No program has an index that depends on data: the host's masks decide what is written and what is seen. Token t sees
slot s if and only if the position last written to s is not after t's position. So a rejected draft costs nothing: its
slots are hidden by their positions until they are written again.

If its window is short enough, a sliding layer keeps no more than it sees: W slots as a ring, position p in slot
p mod W. Otherwise W is S, the layer has the same slots as the other layers, and kv_write_mask_sliding does not exist.

A layer that is a recurrence keeps s_i, its state as of a position: every earlier position is in it, no other. The ring
c_i has what each position would add, before a convolution of L taps. models/recurrences.py has the axes and channels of
each kind. A pass puts its own tokens into the ring only. It reads two windows of B + L - 1 positions from the ring. The
second window ends with the pass' own tokens. If it has room for the pending tokens before them, the first window is
empty. Otherwise the first window holds the pending tokens, and the pass folds them into the state. A column of zeros,
in the place of a position that does not count, changes nothing. So a rejected draft is never folded. The windows'
columns are rows of recurrent_read_mask, at its first token; recurrent_keep_mask is 0 where a text begins, and
recurrent_out_mask finds each token's column in the second window.

A program of fixed shapes may take more than B tokens in a pass, a multiple of B (GraphSpec.blocks). Such a pass folds
what is pending, and cuts its own tokens into blocks of B. It reads them directly; from the second window it takes the
L - 1 positions before the pass. Each block that a token follows is folded in the pass, so only the last tokens, at most
B, may be rejected. They stay pending, and with the L - 1 positions before them they are put into the ring, in slots
that the pass does not read. A token that fills the pass up has zeros in recurrent_out_mask, and is kept nowhere.

A program may also have no states (GraphSpec.hosted). Then k_i, v_i, c_i and s_i are inputs with the states' shapes. The
program writes the new tokens into its copies by the same masks and sees them there. It returns the new rows as further
outputs, which the host writes into its caches: k_i_new, v_i_new [1, kv_heads, T, head_dim], c_i_new [1, 1, ., T]. The
output s_i_new replaces s_i.

The weights of a layer are defined in models/layer_constants.py, the inputs and weights of whole programs in
models/part_kinds.py. models/mixers.py says what each mixer keeps, and models/caches.py how a pass changes it. This file
defines everything else for conversion, engine, gates and manifest. runtime/kv.py computes the masks and the rotary rows
of a pass, runtime/pack.py an encoder's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from shardmill.errors import ShardmillError
from shardmill.models.architecture import SLIDING_MASK, EncoderIO, Graph, LayerSpec, cache_source
from shardmill.models.caches import RING, CacheKind, Shape, T, cache_kind, new_shape
from shardmill.models.interface import FIXED, HOST, EntryPoints
from shardmill.models.mixers import MIXERS
from shardmill.models.tower import TowerIO

CACHE_ITEM_BYTES = 2  # states and the host's caches are fp16
DECAY_SCALE = 64.0  # of a recurrence's decays or steps, wherever they are kept: a slow head's are subnormal in fp16
BLOCK = 8  # B, the most tokens that a recurrence folds at once
TAP = "tap_"  # begins the name of an output that other programs read
ORDER = "order"  # the constant that falls from expert to expert, see models/mixture.py
LABEL_STEP = 16  # coremltools keeps arrays of fewer than 10 elements outside the weight file
PER_LAYER = "per_layer"  # the host's table of rows for each token and layer
MODEL_NORM = "model_norm"  # in a join and an mtp: the model's last norm
BY_TOKEN = ("embedding", PER_LAYER)  # the host's tables with rows for each token; they may be stored in int8
# Of one product of queries and keys, on any system: the judge's limit, whose code no conversion shall depend on.
MOST_SCORES = (1 << 20) - 1
WINDOW_STEP = 32  # a ring of a sliding layer is a multiple of this


@dataclass(frozen=True)
class GraphSpec:
    """Everything that decides a part's program, and so its interface."""

    kind: str  # a key of PART_KINDS (models/part_kinds.py), or "embedding", the host's tables
    graph: Graph
    layers: tuple[tuple[int, LayerSpec], ...] = ()  # absolute index and kind of each layer
    slots: int = 0  # S
    window_slots: int = 0  # W if sliding layers keep rings; 0 if they keep as many slots as the other layers
    rows: int = 0  # of the vocabulary, or experts, or taps, or the width of a join's model
    ends: EncoderIO | None = None  # of an encoder
    tower: TowerIO | None = None  # of a tower
    taps: tuple[int, ...] = ()  # layers of the part, but not its first, whose input is a further output
    lent: tuple[tuple[int, LayerSpec], ...] = ()  # layers of other parts, whose caches this part reads
    tokens: int = 0  # at most in a pass, the upper bound of T: tokens_max of model.json; of an encoder or a tower, T
    calls: EntryPoints = EntryPoints()

    @property
    def hosted(self) -> bool:
        """Return whether the host keeps what states would hold."""
        return self.calls.state == HOST

    @property
    def blocks(self) -> int:
        """Return how many blocks of BLOCK tokens a pass has if a recurrence takes it in several; otherwise 1."""
        return max(self.tokens // BLOCK, 1) if self.recurs else 1

    @property
    def ropes(self) -> tuple[str, ...]:
        """Return the rotary tables that its layers use, sorted."""
        return tuple(sorted({kind.rope for _, kind in self.layers if kind.attends and kind.rope}))

    @property
    def masks(self) -> tuple[str, ...]:
        """Return the attention masks that its layers use, sorted."""
        return tuple(sorted({kind.mask for _, kind in self.layers if kind.attends}))

    @property
    def written_masks(self) -> tuple[str, ...]:
        """Return the attention masks of layers that keep a cache, sorted."""
        if self.encodes:
            return ()
        return tuple(sorted({kind.mask for _, kind in self.layers if kind.attends and not kind.shares}))

    @property
    def encodes(self) -> bool:
        """Return whether its tokens see one another, and nothing is kept from pass to pass: an encoder's, a tower's."""
        return self.ends is not None or self.tower is not None

    @property
    def label_rows(self) -> int:
        """Return rows of an encoder's logits.

        The labels, and then the first labels again up to a multiple of LABEL_STEP.
        """
        return -(-self.ends.labels // LABEL_STEP) * LABEL_STEP if self.ends else 0

    def slots_of(self, mask: str) -> int:
        """Return key/value slots of layers with an attention mask; of an encoder, the tokens of the pass."""
        if self.encodes:
            return T
        return self.window_slots if mask == SLIDING_MASK and self.window_slots else self.slots

    def rows_at_once(self, kind: LayerSpec) -> int:
        """Return how many queries a layer multiplies by its keys at once; 0 for all, where these are few (rule S9).

        The queries of heads that share keys are rows of one product. If the width of a pass may change, they can't be
        counted beforehand, and are multiplied at once.
        """
        if not self.encodes and self.calls.shapes != FIXED:
            return 0
        rows = self.graph.of(kind).group * self.tokens
        keys = (self.tokens if self.encodes else self.slots_of(kind.mask)) + self.graph.sinks
        most = max(1, MOST_SCORES // max(1, keys))
        pieces = -(-rows // most)
        return -(-rows // pieces) if pieces > 1 else 0

    def write_mask(self, mask: str) -> str:
        """Return the input that says where layers with an attention mask write."""
        return "kv_write_mask_sliding" if mask == SLIDING_MASK and self.window_slots else "kv_write_mask"

    @property
    def ends_in_experts(self) -> bool:
        """Return whether the part ends in the middle of a layer because the host routes to experts."""
        experts = self.graph.experts
        ends = bool(self.layers) and self.layers[-1][1].ffn == "experts"
        return ends and experts is not None and experts.routed

    def source(self, index: int) -> int:
        """Return the layer whose cache a layer reads, itself or an earlier one of the part.

        Raises:
            ShardmillError: if no layer of the part has that cache.
        """
        layer = cache_source((*self.lent, *self.layers), index)
        if layer is None:
            raise ShardmillError(f"layer {index} reads the cache of a layer that is not in its part")
        return layer

    @property
    def convolves(self) -> bool:
        """Return whether any layer has convolutions over a ring that tokens read one by one."""
        return any(kind.mixer in ("conv", "cca") for _, kind in self.layers)

    @property
    def recurs(self) -> bool:
        """Return whether any layer is a recurrence."""
        return any(kind.recurs for _, kind in self.layers)

    @property
    def routes(self) -> bool:
        """Return whether any layer has a router."""
        return any(kind.ffn == "experts" for _, kind in self.layers)


def window_slots(window: int | None, tokens: int, slots: int) -> int:
    """Return slots of a sliding layer's ring, or 0 if a ring would not have fewer slots than `slots`.

    A pass writes up to `tokens` positions before the first of its tokens looks `window` - 1 positions back. A rejected
    draft leaves one more position to read.
    """
    needed = -(-((window or slots) - 1 + tokens) // WINDOW_STEP) * WINDOW_STEP
    return needed if needed < slots else 0


def most_tokens(taps: int) -> int:
    """Return the most tokens of a pass whose first token still finds the `taps` - 1 tokens before it in the ring."""
    return RING - taps + 1


def lent_caches(spec: GraphSpec) -> dict[str, Shape]:
    """Return the caches of other parts that a part reads, by name, in order."""
    return caches(replace(spec, layers=spec.lent, lent=()))


def rope_inputs(table: str) -> tuple[str, str]:
    """Return the names of the inputs for the cosines and sines of a rotary table: rope -> rope_cos, rope_sin."""
    stem, _, rest = table.partition("_")
    return (f"{stem}_cos_{rest}", f"{stem}_sin_{rest}") if rest else (f"{stem}_cos", f"{stem}_sin")


def states(spec: GraphSpec) -> dict[str, Shape]:
    """Return the states of a program by name, in order; empty if the host keeps their content."""
    return {} if spec.hosted else caches(spec)


def new_rows(spec: GraphSpec) -> dict[str, Shape]:
    """Return the further outputs of a program whose caches the host keeps: the new rows of each cache, in order.

    The row of token t belongs in the slot that the write mask of its layer gives for t. A recurrence's state is new as
    a whole.
    """
    if not spec.hosted:
        return {}
    return {new_name(name): new_shape(name, shape) for name, shape in caches(spec).items()}


def taps(spec: GraphSpec) -> dict[str, Shape]:
    """Return the outputs of a program that other programs read, in order: the hidden state at a layer's input."""
    return {tap_name(layer): (1, spec.graph.hidden + spec.graph.carry, T, 1) for layer in spec.taps}


def tap_name(layer: int) -> str:
    """Return the name of the output with the hidden state at a layer's input."""
    return f"{TAP}{layer}"


def new_name(cache: str) -> str:
    """Return the name of the output with the rows that a pass adds to a cache."""
    return f"{cache}_new"


def caches(spec: GraphSpec) -> dict[str, Shape]:
    """Return the caches kept between passes by name, in order.

    These are k_i and v_i of attention layers, c_i of convolutions, and c_i and s_i of recurrences.
    """
    by_layer = {
        i: MIXERS[kind.mixer].caches(spec.graph.of(kind), spec.slots_of(kind.mask))
        for i, kind in spec.layers
        if kind.mixer and not kind.shares and not spec.encodes
    }
    return {f"{letter}_{i}": shape for i, shapes in by_layer.items() for letter, shape in shapes.items()}


def has_positions(name: str, shape: Shape, slots: int) -> bool:
    """Return whether a cache has a slot for each position of a context of `slots` positions.

    Then the rows of some positions are all that the cache holds for these positions. Another cache, such as a ring,
    holds what the next position needs, and is of use only as a whole.

    Args:
        name: the cache's name, see `caches`.
        shape: its shape in the whole context.
        slots: the whole context, S.
    """
    return cache_kind(name) is CacheKind.KV and shape[2] == slots


def cache_bytes(spec: GraphSpec) -> int:
    """Return the bytes of all that is kept from pass to pass."""
    return sum(CACHE_ITEM_BYTES * prod(shape) for shape in caches(spec).values())
