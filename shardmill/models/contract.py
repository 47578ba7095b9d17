"""The graph contract: what goes into each kind of program, what it keeps, and what comes out.

A model is a chain of parts, and a part has a kind:

    kind    in                                                          states               out
    layers  x [1, d, T, 1]                                              k_i, v_i, c_i        hidden [1, d, T, 1]
            rope_cos, rope_sin [T, rope_dim / 2], rope_*_local
            attn_mask [1, 1, T, S], attn_mask_sliding [1, 1, T, W]
            kv_write_mask [1, 1, S, T], kv_write_mask_sliding [1, 1, W, T]
            conv_write_mask [1, 1, T, R], conv_read_mask [1, L - 1, R, T]
    head    hidden [1, d, T, 1]                                         none                 logits [1, rows, T, 1]
    encoder x [1, d, T, 1]                                              none                 logits [1, rows, T, 1]
            rope_cos, rope_sin [T, rope_dim / 2], rope_*_local                               or hidden [1, d, T, 1]
            attn_mask [1, 1, T, T], attn_mask_sliding [1, 1, T, T]

Which of the inputs a part has follows from the kinds of its layers. d is the hidden width, S the key/value slots, W
those of a sliding layer, R the slots of a convolution's ring, L its taps; every input carries T, the tokens of a pass.
What a token carries from part to part beside the residual stream, a router's state, lies in channels of x and hidden
after the first d; the host gives the first part zeros there. An encoder is one part of kind "encoder" for each number
of tokens that it is built for (a bucket): there T is that number, and its tokens see one another through the masks.

No program has an index that depends on data: the host says by masks what is written and what is seen. Token t sees slot
s if and only if s was last written with a position that is not after t's, so a rejected draft costs nothing: its slots
are hidden by their positions until they are written again.

Where its window is short enough, a sliding layer keeps no more than it sees: W slots as a ring, position p in slot
p mod W. Else W is S, its slots are those of the other layers, and there is no kv_write_mask_sliding.

This file alone spells that out; conversion, engine, gates and manifest ask it. How the host computes the masks and the
rotary rows of a pass stands in models/host.py, and for encoders in models/buckets.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardmill.models.architecture import SLIDING_MASK, Architecture, Ends, Graph, Kind

Shape = tuple[int, ...]

T = -1  # stands for the token axis in shapes
RING = 32  # slots of a convolution's ring: the narrowest state that the Neural Engine takes (rule S8)
ORDER = "order"  # the constant that falls from expert to expert, see models/routing.py
LABEL_STEP = 16  # coremltools keeps arrays of fewer than 10 elements outside the weight file
WINDOW_STEP = 32  # a ring of a sliding layer is a multiple of this


@dataclass(frozen=True)
class Form:
    """All that decides the interface of a part."""

    kind: str  # "layers", "head" or "encoder"
    graph: Graph
    layers: tuple[tuple[int, Kind], ...] = ()  # absolute index and kind of each layer
    slots: int = 0  # S
    window_slots: int = 0  # W where sliding layers keep rings; 0 where they keep as much as the others
    rows: int = 0  # of the vocabulary
    ends: Ends | None = None  # of an encoder

    @property
    def ropes(self) -> tuple[str, ...]:
        """The rotary tables that its layers use, sorted."""
        return tuple(sorted({kind.rope for _, kind in self.layers if kind.mixer != "conv" and kind.rope}))

    @property
    def masks(self) -> tuple[str, ...]:
        """The attention masks that its layers use, sorted."""
        return tuple(sorted({kind.mask for _, kind in self.layers if kind.mixer != "conv"}))

    @property
    def label_rows(self) -> int:
        """Rows of an encoder's logits: its labels and, up to a multiple of LABEL_STEP, the first of them once more."""
        return -(-self.ends.labels // LABEL_STEP) * LABEL_STEP if self.ends else 0

    def kept(self, mask: str) -> int:
        """Key/value slots of layers with an attention mask; of an encoder, the tokens of the pass."""
        if self.kind == "encoder":
            return T
        return self.window_slots if mask == SLIDING_MASK and self.window_slots else self.slots

    def write_mask(self, mask: str) -> str:
        """The input that says where layers with an attention mask write."""
        return "kv_write_mask_sliding" if mask == SLIDING_MASK and self.window_slots else "kv_write_mask"

    @property
    def convolves(self) -> bool:
        """Whether any layer has convolutions."""
        return any(kind.mixer != "attention" for _, kind in self.layers)

    @property
    def routes(self) -> bool:
        """Whether any layer has experts."""
        return any(kind.ffn == "experts" for _, kind in self.layers)


def window_slots(window: int | None, tokens: int, slots: int) -> int:
    """Slots of a sliding layer's ring, or 0 where that would not be fewer than there are.

    A pass writes up to `tokens` positions before the first of them looks `window` - 1 positions back, and a draft that
    is rejected leaves one more than that to be looked at.
    """
    needed = -(-((window or slots) - 1 + tokens) // WINDOW_STEP) * WINDOW_STEP
    return needed if needed < slots else 0


def inputs(form: Form) -> dict[str, Shape]:
    """The inputs of a program by name, in order; T stands for the token axis."""
    g = form.graph
    if form.kind == "head":
        return {"hidden": (1, g.hidden + g.carry, T, 1)}
    found: dict[str, Shape] = {"x": (1, g.hidden + g.carry, T, 1)}
    for name in form.ropes:
        cos, sin = rope_inputs(name)
        found |= {cos: (T, g.rope_dim // 2), sin: (T, g.rope_dim // 2)}
    found |= {name: (1, 1, T, form.kept(name)) for name in form.masks}
    if form.kind == "encoder":
        return found
    found |= {form.write_mask(name): (1, 1, form.kept(name), T) for name in form.masks}
    if form.convolves:
        found |= {"conv_write_mask": (1, 1, T, RING), "conv_read_mask": (1, g.conv_taps - 1, RING, T)}
    return found


def rope_inputs(table: str) -> tuple[str, str]:
    """Names of the inputs for the cosines and sines of a rotary table: rope -> rope_cos, rope_sin."""
    stem, _, rest = table.partition("_")
    return (f"{stem}_cos_{rest}", f"{stem}_sin_{rest}") if rest else (f"{stem}_cos", f"{stem}_sin")


def states(form: Form) -> dict[str, Shape]:
    """The states of a program by name, in order: k_i and v_i of attention layers, c_i of convolutions."""
    g = form.graph
    found: dict[str, Shape] = {}
    for i, kind in () if form.kind == "encoder" else form.layers:
        if kind.mixer != "conv":
            found |= {f"{name}_{i}": (1, g.kv_heads, form.kept(kind.mask), g.head_dim) for name in "kv"}
        if kind.mixer != "attention":
            found[f"c_{i}"] = (1, 1, g.hidden if kind.mixer == "conv" else sum(cca_widths(g)), RING)
    return found


def cca_widths(g: Graph) -> tuple[int, int]:
    """Channels of ZAYA's attention that its ring keeps: query and key together, and the delayed half of the value."""
    return (g.heads + g.kv_heads) * g.head_dim, g.kv_heads * g.head_dim // 2


def output(form: Form) -> str:
    """The name of a program's one output."""
    return "logits" if form.kind == "head" or form.label_rows else "hidden"


def constants(form: Form) -> dict[str, Shape]:
    """The weights of a program by their path in it, in order, with their shapes."""
    g = form.graph
    if form.kind == "head":
        return _norm("norm", g) | _projection("lm_head", form.rows, g.hidden, g.head_bias)
    layers = {
        f"layers.{i}.{role}": shape for i, kind in form.layers for role, shape in layer_constants(g, kind).items()
    }
    return layers if form.ends is None else _around(layers, form, form.ends)


def _around(layers: Mapping[str, Shape], form: Form, ends: Ends) -> dict[str, Shape]:
    """The weights of an encoder's program, given those of its layers."""
    g, found = form.graph, dict(layers)
    if ends.embed_norm:
        found = _norm("embed_norm", g) | found
    if ends.final_norm:
        found |= _norm("norm", g)
    if ends.dense:
        found |= _projection("dense", g.hidden, g.hidden, ends.dense_bias)
    if ends.dense_norm:
        found |= _norm("dense_norm", g)
    return found | (_projection("classifier", form.label_rows, g.hidden, ends.label_bias) if ends.labels else {})


def program_form(a: Architecture) -> Form:
    """The form of a program with all layers of a model: of an encoder, that of its every part."""
    layers = tuple(enumerate(a.kinds))
    return Form("encoder", a.graph, layers, ends=a.ends) if a.ends else Form("layers", a.graph, layers)


def table_constants(a: Architecture) -> dict[str, Shape]:
    """The host's tables by path, with their shapes."""
    found: dict[str, Shape] = {"embedding": (a.vocab, a.graph.hidden)}
    named = {"positions": a.positions, "types": a.types}
    return found | {path: (rows, a.graph.hidden) for path, rows in named.items() if rows}


def model_constants(a: Architecture) -> dict[str, Shape]:
    """The weights of all programs and the host's tables by path, with their shapes."""
    head = {} if a.ends else constants(Form("head", a.graph, rows=a.vocab))
    return constants(program_form(a)) | head | table_constants(a)


def computed(form: Form) -> dict[str, tuple[float, ...]]:
    """Constants that no checkpoint decides, by their path."""
    if not form.routes or form.graph.experts is None:
        return {}
    return {ORDER: tuple(float(n) for n in range(form.graph.experts.classes, 0, -1))}


def stem(path: str) -> str:
    """What coremltools calls a constant: its path in the PyTorch module, spelled as an identifier."""
    return path.replace(".", "_")


def layer_constants(g: Graph, kind: Kind) -> dict[str, Shape]:
    """The weights of one layer by their path from the layer, with their shapes.

    A matrix of two axes is a convolution's, which INT8 quantises. One of three is a factor of a matrix product, as are
    a router's and those of grouped convolutions: it stays in fp16.
    """
    mixer = {"conv": _convolution, "attention": _attention, "cca": _cca}[kind.mixer](g)
    ffn = _mixture(g, kind) if kind.ffn == "experts" else _feed_forward(g)
    first = _norm("input_layernorm", g) if kind.normed else {}
    second, last = _norm("post_attention_layernorm", g), _norm("post_feedforward_layernorm", g)
    if g.outer_norms:
        return {**mixer, **second, **ffn, **last}
    if g.residual_scales:
        scales = [_residual(f"{name}_residual_scale", g) for name in ("post_attention", "post_mlp")]
        return {**first, **mixer, **scales[0], **second, **ffn, **scales[1]}
    if not g.post_norms:
        return {**first, **mixer, **second, **ffn}
    before = _norm("pre_feedforward_layernorm", g) if g.pre_norms else {}
    start = first if g.pre_norms else {}
    return {**start, **mixer, **second, **before, **ffn, **last}


def _norm(path: str, g: Graph) -> dict[str, Shape]:
    gain: dict[str, Shape] = {f"{path}.weight": (g.hidden,)}
    return gain | ({f"{path}.bias": (g.hidden,)} if g.norm == "layer" and g.norm_bias else {})


def _residual(path: str, g: Graph) -> dict[str, Shape]:
    names = ("hidden_states_bias", "hidden_states_scale", "residual_bias", "residual_scale")
    return {f"{path}.{name}": (g.hidden,) for name in names}


def _attention(g: Graph) -> dict[str, Shape]:
    q, kv, p = g.heads * g.head_dim, g.kv_heads * g.head_dim, "self_attn."
    rows = {"qkv": q + 2 * kv} if g.fused else {"q": q, "k": kv, "v": kv}
    found: dict[str, Shape] = {}
    for name, count in rows.items():
        found |= _projection(f"{p}{name}_proj", count, g.hidden, g.qkv_bias)
    if g.qk_norm:
        widths = (q, kv) if g.qk_norm == "wide" else (g.head_dim, g.head_dim)
        found |= {f"{p}q_norm.weight": widths[:1], f"{p}k_norm.weight": widths[1:]}
    sinks: dict[str, Shape] = {f"{p}sinks": (g.heads,)} if g.sinks else {}
    return found | sinks | _projection(f"{p}o_proj", g.hidden, q, g.o_bias)


def _cca(g: Graph) -> dict[str, Shape]:
    q, kv, p = g.heads * g.head_dim, g.kv_heads * g.head_dim, "self_attn."
    rows = {"q_proj": q, "k_proj": kv, "v_proj_current": kv // 2, "v_proj_delayed": kv // 2}
    found: dict[str, Shape] = {f"{p}{name}.weight": (count, g.hidden) for name, count in rows.items()}
    found |= {f"{p}depthwise.{name}": (q + kv,) for name in ("tap_0", "tap_1", "bias")}
    found |= {f"{p}grouped.tap_{j}": (g.heads + g.kv_heads, g.head_dim, g.head_dim) for j in range(2)}
    return found | {f"{p}grouped.bias": (q + kv,), f"{p}k_gain": (kv,), f"{p}o_proj.weight": (g.hidden, q)}


def _convolution(g: Graph) -> dict[str, Shape]:
    taps: dict[str, Shape] = {f"conv.tap_{j}": (g.hidden,) for j in range(g.conv_taps)}
    return {
        **_projection("conv.in_proj", 3 * g.hidden, g.hidden, False),
        **taps,
        **_projection("conv.out_proj", g.hidden, g.hidden, False),
    }


def _feed_forward(g: Graph) -> dict[str, Shape]:
    rows = {"gate_up": 2 * g.ffn} if g.fused else {"gate": g.ffn, "up": g.ffn} if g.gated else {"up": g.ffn}
    found: dict[str, Shape] = {}
    for name, count in rows.items():
        found |= _projection(f"mlp.{name}_proj", count, g.hidden, g.mlp_bias)
    return found | _projection("mlp.down_proj", g.hidden, g.ffn, g.mlp_bias)


def _mixture(g: Graph, kind: Kind) -> dict[str, Shape]:
    e = g.experts
    assert e is not None
    found: dict[str, Shape] = {"mlp.router.weight": (1, e.classes, g.hidden)}
    if e.router == "mlp":
        found = _mlp_router(g, kind)
    if e.router_bias:
        found["mlp.router.bias"] = (e.classes,)
    if e.choice_bias:
        found["mlp.choice_bias"] = (e.classes,)
    wide = e.group * e.ffn
    for j in range(e.count // e.group):
        path = f"mlp.experts.{j}."
        found |= _projection(f"{path}gate_proj", wide, g.hidden, e.biases)
        found |= _projection(f"{path}up_proj", wide, g.hidden, e.biases)
        found |= {f"{path}scale": (wide,)} if e.group > 1 else {}
        found[f"{path}down_proj.weight"] = (g.hidden, wide)
    return found | ({"mlp.down_bias": (1, g.hidden, e.count)} if e.biases else {})


def _mlp_router(g: Graph, kind: Kind) -> dict[str, Shape]:
    assert g.experts is not None
    p, width = "mlp.router.", g.experts.router_width
    found: dict[str, Shape] = {f"{p}down_proj.weight": (1, width, g.hidden), f"{p}down_proj.bias": (width,)}
    found |= {f"{p}states_scale": (width,)} if kind.carries else {}
    found[f"{p}norm.weight"] = (width,)
    for name in ("fc1", "fc2"):
        found |= {f"{p}{name}.weight": (1, width, width), f"{p}{name}.bias": (width,)}
    return found | {f"{p}out_proj.weight": (1, g.experts.classes, width)}


def _projection(path: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{path}.weight": (rows, columns)}
    return weight | ({f"{path}.bias": (rows,)} if bias else {})
