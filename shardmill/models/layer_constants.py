"""The weights of one layer by their path from the layer, with their shapes: a part of the contract (contract.py)."""

from __future__ import annotations

from dataclasses import replace

from shardmill.models.architecture import XIELU, Experts, Graph, LayerSpec

Shape = tuple[int, ...]
EXPERT = "experts."
# Constants of a group of experts that belong to no single expert -> their paths in the layer.
OF_GROUP = {"down_bias": "mlp.down_bias", "branch_scale": "post_mlp_residual_scale.hidden_states_scale"}


def cca_widths(g: Graph) -> tuple[int, int]:
    """Return channels of ZAYA's attention that its ring keeps.

    Query and key together, and the delayed half of the value.
    """
    return (g.heads + g.kv_heads) * g.head_dim, g.kv_heads * g.head_dim // 2


def layer_constants(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    """Return the weights of one layer by their path from the layer, with their shapes.

    A matrix of two axes is a convolution's, which INT8 quantises. A matrix of three axes, such as a router's or a
    grouped convolution's, is a factor of a matrix product: it stays in fp16.
    """
    g = g.of(kind)
    others = {"conv": _convolution, "cca": _cca, "delta": _delta, "mamba": _mamba}
    if not kind.mixer:
        return {**norm_constants("post_attention_layernorm", g), **_feed_forward(g, "mlp.")}
    mixer = _attention(g, kind) if kind.mixer == "attention" else others[kind.mixer](g)
    first = norm_constants("input_layernorm", g) if kind.normed else {}
    if not kind.ffn:
        return {**first, **mixer}
    ffn = _mixture(g, kind) if kind.ffn == "experts" else _feed_forward(g, "mlp.")
    first |= norm_constants("hidden_norm", g) if kind.paired else {}
    second, last = norm_constants("post_attention_layernorm", g), norm_constants("post_feedforward_layernorm", g)
    if g.outer_norms:
        return {**mixer, **second, **ffn, **last}
    if g.residual_scales:
        scales = [_residual(f"{name}_residual_scale", g) for name in ("post_attention", "post_mlp")]
        return {**first, **mixer, **scales[0], **second, **ffn, **scales[1]}
    if g.parallel:
        return {**first, **mixer, **ffn}
    if not g.post_norms:
        return {**first, **mixer, **second, **ffn}
    before = norm_constants("pre_feedforward_layernorm", g) if g.pre_norms else {}
    start = first if g.pre_norms else {}
    scale: dict[str, Shape] = {"layer_scale": (g.hidden,)} if g.layer_scale else {}
    return {**start, **mixer, **second, **before, **ffn, **last, **_per_layer(g), **scale}


def mixer_constants(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    """Return the weights in the program of a layer's mixer: all, or all but the experts' if the host routes."""
    found = layer_constants(g, kind)
    if g.experts is None or not g.experts.routed:
        return found
    elsewhere = (f"mlp.{EXPERT}", OF_GROUP["down_bias"])
    return {path: shape for path, shape in found.items() if not path.startswith(elsewhere)}


def group_constants(g: Graph, count: int) -> dict[str, Shape]:
    """Return the weights of a program that holds `count` of a layer's experts, by their paths in it."""
    assert g.experts is not None
    found = _expert_matrices(g, replace(g.experts, count=count), "")
    return found | ({"branch_scale": (g.hidden,)} if g.residual_scales else {})


def role_in_layer(path: str, first: int) -> str:
    """Return the path in the layer of a constant of a group of experts.

    Args:
        path: the constant's path in the group's program, where the experts are counted from 0.
        first: the index J of the layer's `experts.J` that is the group's first.
    """
    if not path.startswith(EXPERT):
        return OF_GROUP[path]
    number, rest = path.removeprefix(EXPERT).split(".", 1)
    return f"mlp.{EXPERT}{first + int(number)}.{rest}"


def norm_constants(path: str, g: Graph) -> dict[str, Shape]:
    """Return the weights of a norm over the hidden width."""
    gain: dict[str, Shape] = {f"{path}.weight": (g.hidden,)}
    return gain | ({f"{path}.bias": (g.hidden,)} if g.norm == "layer" and g.norm_bias else {})


def _residual(path: str, g: Graph) -> dict[str, Shape]:
    names = ("hidden_states_bias", "hidden_states_scale", "residual_bias", "residual_scale")
    return {f"{path}.{name}": (g.hidden,) for name in names}


def _per_layer(g: Graph) -> dict[str, Shape]:
    """Return the weights that bring a token's row for the layer into the stream."""
    if not g.per_layer:
        return {}
    p = "per_layer."
    return {
        **projection_constants(f"{p}model_projection", g.per_layer, g.hidden, False),
        f"{p}projection_norm.weight": (g.per_layer,),
        **projection_constants(f"{p}gate", g.per_layer, g.hidden, False),
        **projection_constants(f"{p}projection", g.hidden, g.per_layer, False),
        **norm_constants(f"{p}norm", g),
    }


def _attention(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    q, kv, p = g.heads * g.head_dim, g.kv_heads * g.head_dim, "self_attn."
    rows = {"qkv": q + 2 * kv} if g.fused else {"q": q, "k": kv, "v": kv}
    rows = {name: rows[name] for name in rows if name not in missing_projections(kind)}
    columns = 2 * g.hidden if kind.paired else g.hidden
    found: dict[str, Shape] = {}
    for name, count in rows.items():
        found |= projection_constants(f"{p}{name}_proj", count, columns, g.qkv_bias)
    if g.qk_norm:
        widths = (q, kv) if g.qk_norm == "wide" else (g.head_dim, g.head_dim)
        found |= {f"{p}q_norm.weight": widths[:1]}
        found |= {} if kind.shares else {f"{p}k_norm.weight": widths[1:]}
    sinks: dict[str, Shape] = {f"{p}sinks": (g.heads,)} if g.sinks else {}
    sinks |= projection_constants(f"{p}gate_proj", q, g.hidden, False) if g.output_gate else {}
    return found | sinks | projection_constants(f"{p}o_proj", g.hidden, q, g.o_bias)


def missing_projections(kind: LayerSpec) -> str:
    """Return which of the projections q, k and v an attention layer lacks."""
    return "kv" if kind.shares else "v" if kind.key_is_value else ""


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
        **projection_constants("conv.in_proj", 3 * g.hidden, g.hidden, False),
        **taps,
        **projection_constants("conv.out_proj", g.hidden, g.hidden, False),
    }


def _delta(g: Graph) -> dict[str, Shape]:
    delta, p = g.delta, "linear_attn."
    assert delta is not None
    wide, heads = delta.value_heads * delta.value_dim, delta.value_heads
    return {
        **projection_constants(f"{p}in_proj_qkv", delta.mixed, g.hidden, False),
        f"{p}in_proj_ba.weight": (1, 2 * heads, g.hidden),
        f"{p}dt_bias": (heads,),
        f"{p}rate": (heads,),
        **{f"{p}tap_{j}": (delta.mixed,) for j in range(delta.taps)},
        f"{p}norm.weight": (delta.value_dim,),
        **projection_constants(f"{p}in_proj_z", wide, g.hidden, False),
        **projection_constants(f"{p}out_proj", g.hidden, wide, False),
    }


def _mamba(g: Graph) -> dict[str, Shape]:
    mamba, p = g.mamba, "mamba."
    assert mamba is not None
    bias: dict[str, Shape] = {f"{p}conv_bias": (mamba.mixed,)} if mamba.conv_bias else {}
    return {
        **projection_constants(f"{p}in_proj_xbc", mamba.mixed, g.hidden, False),
        f"{p}in_proj_dt.weight": (1, mamba.heads, g.hidden),
        **{f"{p}{name}": (mamba.heads,) for name in ("dt_bias", "rate", "skip")},
        **{f"{p}tap_{j}": (mamba.mixed,) for j in range(mamba.taps)},
        **bias,
        **projection_constants(f"{p}in_proj_z", mamba.width, g.hidden, False),
        f"{p}norm.weight": (mamba.width,),
        **projection_constants(f"{p}out_proj", g.hidden, mamba.width, False),
    }


def _feed_forward(g: Graph, path: str) -> dict[str, Shape]:
    rows = {"gate_up": 2 * g.ffn} if g.fused else {"gate": g.ffn, "up": g.ffn} if g.gated else {"up": g.ffn}
    found: dict[str, Shape] = {}
    for name, count in rows.items():
        found |= projection_constants(f"{path}{name}_proj", count, g.hidden, g.mlp_bias)
    if g.activation == XIELU:
        found |= {f"{path}act_fn.{name}": (g.ffn,) for name in ("alpha_p", "alpha_n")}
    return found | projection_constants(f"{path}down_proj", g.hidden, g.ffn, g.mlp_bias)


def _mixture(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    e = g.experts
    assert e is not None
    found: dict[str, Shape] = {"mlp.router.weight": (1, e.classes, g.hidden)}
    if e.router == "mlp":
        found = _mlp_router(g, kind)
    if e.router_bias:
        found["mlp.router.bias"] = (e.classes,)
    if e.choice_bias:
        found["mlp.choice_bias"] = (e.classes,)
    beside = _feed_forward(g, "shared_mlp.") if e.beside else {}
    beside |= {"shared_mlp_gate.weight": (1, 1, g.hidden)} if e.beside_gate else {}
    return found | _expert_matrices(g, e, "mlp.") | beside


def _expert_matrices(g: Graph, e: Experts, prefix: str) -> dict[str, Shape]:
    """Return the weights of the experts themselves."""
    found: dict[str, Shape] = {}
    wide = e.group * e.ffn
    for j in range(e.count // e.group):
        path = f"{prefix}{EXPERT}{j}."
        found |= projection_constants(f"{path}gate_proj", wide, g.hidden, e.biases)
        found |= projection_constants(f"{path}up_proj", wide, g.hidden, e.biases)
        found |= {f"{path}scale": (wide,)} if e.group > 1 else {}
        found[f"{path}down_proj.weight"] = (g.hidden, wide)
    return found | ({f"{prefix}down_bias": (1, g.hidden, e.count)} if e.biases else {})


def _mlp_router(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    assert g.experts is not None
    p, width = "mlp.router.", g.experts.router_width
    found: dict[str, Shape] = {f"{p}down_proj.weight": (1, width, g.hidden), f"{p}down_proj.bias": (width,)}
    found |= {f"{p}states_scale": (width,)} if kind.carries else {}
    found[f"{p}norm.weight"] = (width,)
    for name in ("fc1", "fc2"):
        found |= {f"{p}{name}.weight": (1, width, width), f"{p}{name}.bias": (width,)}
    return found | {f"{p}out_proj.weight": (1, g.experts.classes, width)}


def projection_constants(path: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    """Return the weights of a projection."""
    weight: dict[str, Shape] = {f"{path}.weight": (rows, columns)}
    return weight | ({f"{path}.bias": (rows,)} if bias else {})
