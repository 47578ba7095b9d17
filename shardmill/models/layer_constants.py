"""The weights of one layer by their path from the layer, with their shapes: a part of the contract (contract.py)."""

from __future__ import annotations

from dataclasses import replace

from shardmill.models.architecture import XIELU, Experts, Graph, LayerSpec
from shardmill.models.caches import Shape
from shardmill.models.mixers import MIXERS, projection_constants

EXPERT = "experts."
# Constants of a group of experts that belong to no single expert -> their paths in the layer.
OF_GROUP = {"down_bias": "mlp.down_bias", "branch_scale": "post_mlp_residual_scale.hidden_states_scale"}


def layer_constants(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    """Return the weights of one layer by their path from the layer, with their shapes.

    A matrix of two axes is a convolution's, which INT8 quantises. A matrix of three axes, such as a router's or a
    grouped convolution's, is a factor of a matrix product: it stays in fp16.
    """
    g = g.of(kind)
    if not kind.mixer:
        return {**norm_constants("post_attention_layernorm", g), **_feed_forward(g, "mlp.")}
    declared = MIXERS[kind.mixer]
    mixer = {f"{declared.path}.{name}": shape for name, shape in declared.constants(g, kind).items()}
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
    weights = layer_constants(g, kind)
    if g.experts is None or not g.experts.routed:
        return weights
    elsewhere = (f"mlp.{EXPERT}", OF_GROUP["down_bias"])
    return {path: shape for path, shape in weights.items() if not path.startswith(elsewhere)}


def group_constants(g: Graph, count: int) -> dict[str, Shape]:
    """Return the weights of a program that holds `count` of a layer's experts, by their paths in it."""
    assert g.experts is not None
    weights = _expert_matrices(g, replace(g.experts, count=count), "")
    return weights | ({"branch_scale": (g.hidden,)} if g.residual_scales else {})


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


def _feed_forward(g: Graph, path: str) -> dict[str, Shape]:
    rows = {"gate_up": 2 * g.ffn} if g.fused else {"gate": g.ffn, "up": g.ffn} if g.gated else {"up": g.ffn}
    weights: dict[str, Shape] = {}
    for name, count in rows.items():
        weights |= projection_constants(f"{path}{name}_proj", count, g.hidden, g.mlp_bias)
    if g.activation == XIELU:
        weights |= {f"{path}act_fn.{name}": (g.ffn,) for name in ("alpha_p", "alpha_n")}
    return weights | projection_constants(f"{path}down_proj", g.hidden, g.ffn, g.mlp_bias)


def _mixture(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    e = g.experts
    assert e is not None
    router: dict[str, Shape] = {"mlp.router.weight": (1, e.classes, g.hidden)}
    if e.router == "mlp":
        router = _mlp_router(g, kind)
    if e.router_bias:
        router["mlp.router.bias"] = (e.classes,)
    if e.choice_bias:
        router["mlp.choice_bias"] = (e.classes,)
    beside = _feed_forward(g, "shared_mlp.") if e.beside else {}
    beside |= {"shared_mlp_gate.weight": (1, 1, g.hidden)} if e.beside_gate else {}
    return router | _expert_matrices(g, e, "mlp.") | beside


def _expert_matrices(g: Graph, e: Experts, prefix: str) -> dict[str, Shape]:
    """Return the weights of the experts themselves."""
    weights: dict[str, Shape] = {}
    wide = e.group * e.ffn
    for j in range(e.count // e.group):
        path = f"{prefix}{EXPERT}{j}."
        weights |= projection_constants(f"{path}gate_proj", wide, g.hidden, e.biases)
        weights |= projection_constants(f"{path}up_proj", wide, g.hidden, e.biases)
        weights |= {f"{path}scale": (wide,)} if e.group > 1 else {}
        weights[f"{path}down_proj.weight"] = (g.hidden, wide)
    return weights | ({f"{prefix}down_bias": (1, g.hidden, e.count)} if e.biases else {})


def _mlp_router(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    assert g.experts is not None
    p, width = "mlp.router.", g.experts.router_width
    weights: dict[str, Shape] = {f"{p}down_proj.weight": (1, width, g.hidden), f"{p}down_proj.bias": (width,)}
    weights |= {f"{p}states_scale": (width,)} if kind.carries else {}
    weights[f"{p}norm.weight"] = (width,)
    for name in ("fc1", "fc2"):
        weights |= {f"{p}{name}.weight": (1, width, width), f"{p}{name}.bias": (width,)}
    return weights | {f"{p}out_proj.weight": (1, g.experts.classes, width)}
