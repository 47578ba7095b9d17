"""The kinds of mixers: for each its name, its path in a layer, its weights, and what it keeps from pass to pass.

Planning reads this table without torch. The modules themselves are in attention.py, blocks.py and files of their
own; `blocks.MODULES` has them by the same keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.caches import RING, Shape


@dataclass(frozen=True)
class Mixer:
    """What the rest of the program must know of a mixer.

    Attributes:
        title: what a person reads.
        path: of its weights in the layer.
        constants: its weights by their path from there, with their shapes.
        caches: what it keeps, by the letters of `caches.KINDS`, with shapes; the last argument is the number of slots
            of a layer with the same mask. A layer that shares keeps nothing and is not asked.
    """

    title: str
    path: str
    constants: Callable[[Graph, LayerSpec], dict[str, Shape]]
    caches: Callable[[Graph, int], dict[str, Shape]]


def cca_widths(g: Graph) -> tuple[int, int]:
    """Return channels of ZAYA's attention that its ring keeps.

    Query and key together, and the delayed half of the value.
    """
    return (g.heads + g.kv_heads) * g.head_dim, g.kv_heads * g.head_dim // 2


def missing_projections(kind: LayerSpec) -> str:
    """Return which of the projections q, k and v an attention layer lacks."""
    return "kv" if kind.shares else "v" if kind.key_is_value else ""


def projection_constants(path: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    """Return the weights of a projection."""
    weight: dict[str, Shape] = {f"{path}.weight": (rows, columns)}
    return weight | ({f"{path}.bias": (rows,)} if bias else {})


def _attention(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    rows = {"qkv": q + 2 * kv} if g.fused else {"q": q, "k": kv, "v": kv}
    rows = {name: rows[name] for name in rows if name not in missing_projections(kind)}
    columns = 2 * g.hidden if kind.paired else g.hidden
    weights: dict[str, Shape] = {}
    for name, count in rows.items():
        weights |= projection_constants(f"{name}_proj", count, columns, g.qkv_bias)
    if g.qk_norm:
        widths = (q, kv) if g.qk_norm == "wide" else (g.head_dim, g.head_dim)
        weights |= {"q_norm.weight": widths[:1]}
        weights |= {} if kind.shares else {"k_norm.weight": widths[1:]}
    sinks: dict[str, Shape] = {"sinks": (g.heads,)} if g.sinks else {}
    sinks |= projection_constants("gate_proj", q, g.hidden, False) if g.output_gate else {}
    return weights | sinks | projection_constants("o_proj", g.hidden, q, g.o_bias)


def _cca(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    rows = {"q_proj": q, "k_proj": kv, "v_proj_current": kv // 2, "v_proj_delayed": kv // 2}
    weights: dict[str, Shape] = {f"{name}.weight": (count, g.hidden) for name, count in rows.items()}
    weights |= {f"depthwise.{name}": (q + kv,) for name in ("tap_0", "tap_1", "bias")}
    weights |= {f"grouped.tap_{j}": (g.heads + g.kv_heads, g.head_dim, g.head_dim) for j in range(2)}
    return weights | {"grouped.bias": (q + kv,), "k_gain": (kv,), "o_proj.weight": (g.hidden, q)}


def _convolution(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    taps: dict[str, Shape] = {f"tap_{j}": (g.hidden,) for j in range(g.conv_taps)}
    return {
        **projection_constants("in_proj", 3 * g.hidden, g.hidden, False),
        **taps,
        **projection_constants("out_proj", g.hidden, g.hidden, False),
    }


def _delta(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    delta = g.delta
    assert delta is not None
    wide, heads = delta.value_heads * delta.value_dim, delta.value_heads
    return {
        **projection_constants("in_proj_qkv", delta.mixed, g.hidden, False),
        "in_proj_ba.weight": (1, 2 * heads, g.hidden),
        "dt_bias": (heads,),
        "rate": (heads,),
        **{f"tap_{j}": (delta.mixed,) for j in range(delta.taps)},
        "norm.weight": (delta.value_dim,),
        **projection_constants("in_proj_z", wide, g.hidden, False),
        **projection_constants("out_proj", g.hidden, wide, False),
    }


def _mamba(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    mamba = g.mamba
    assert mamba is not None
    bias: dict[str, Shape] = {"conv_bias": (mamba.mixed,)} if mamba.conv_bias else {}
    return {
        **projection_constants("in_proj_xbc", mamba.mixed, g.hidden, False),
        "in_proj_dt.weight": (1, mamba.heads, g.hidden),
        **{name: (mamba.heads,) for name in ("dt_bias", "rate", "skip")},
        **{f"tap_{j}": (mamba.mixed,) for j in range(mamba.taps)},
        **bias,
        **projection_constants("in_proj_z", mamba.width, g.hidden, False),
        "norm.weight": (mamba.width,),
        **projection_constants("out_proj", g.hidden, mamba.width, False),
    }


def _rg_lru(g: Graph, kind: LayerSpec) -> dict[str, Shape]:
    sizes = g.rg_lru
    assert sizes is not None
    gates: dict[str, Shape] = {}
    for name in ("input_gate", "recurrent_gate"):
        gates |= {name: (sizes.heads, sizes.head_dim, sizes.head_dim), f"{name}_bias": (sizes.width,)}
    return {
        **projection_constants("linear_x", sizes.width, g.hidden, True),
        **{f"tap_{j}": (sizes.width,) for j in range(sizes.taps)},
        "conv_bias": (sizes.width,),
        **gates,
        "rate": (sizes.width,),
        **projection_constants("linear_y", sizes.width, g.hidden, True),
        **projection_constants("linear_out", g.hidden, sizes.width, True),
    }


def _keys_and_values(g: Graph, slots: int) -> dict[str, Shape]:
    return {letter: (1, g.kv_heads, slots, g.head_dim) for letter in "kv"}


def _keys_values_and_ring(g: Graph, slots: int) -> dict[str, Shape]:
    return {**_keys_and_values(g, slots), "c": (1, 1, sum(cca_widths(g)), RING)}


def _ring(g: Graph, slots: int) -> dict[str, Shape]:
    return {"c": (1, 1, g.hidden, RING)}


def _ring_and_state(g: Graph, slots: int) -> dict[str, Shape]:
    sizes = g.recurrence
    assert sizes is not None
    return {"c": (1, 1, sizes.pending, RING), "s": (1, *sizes.state)}


MIXERS = {
    "attention": Mixer("attention", "self_attn", _attention, _keys_and_values),
    "cca": Mixer("convolutional attention", "self_attn", _cca, _keys_values_and_ring),
    "conv": Mixer("convolution", "conv", _convolution, _ring),
    "delta": Mixer("gated DeltaNet", "linear_attn", _delta, _ring_and_state),
    "mamba": Mixer("Mamba-2", "mamba", _mamba, _ring_and_state),
    "rg_lru": Mixer("RG-LRU", "temporal_block", _rg_lru, _ring_and_state),
}
