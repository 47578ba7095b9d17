"""LoRA adapters as inputs of a program: which matrices each input holds.

An adapter replaces a projection W by W + B A, where A is [r, in] and B is [out, r]. If a config asks for adapters of a
rank r, both matrices of every projection are inputs of the layers' programs. An input of a part is a stack. It has a
slice for each layer of the part that has the projections, and a slice holds r rows for each matrix; B is transposed:

    input               shape                              rows of a layer
    adapter_attn        [1, n, 4 r, d]                     A of q_proj, k_proj and v_proj, B of o_proj
    adapter_query       [1, n, 2 r, heads * head_dim]      B of q_proj, A of o_proj
    adapter_key_value   [1, n, 2 r, kv_heads * head_dim]   B of k_proj and v_proj
    adapter_mlp         [1, n, 3 r, d]                     A of gate_proj and up_proj, B of down_proj
    adapter_ffn         [1, n, 3 r, ffn]                   B of gate_proj and up_proj, A of down_proj

d is the hidden width. An MLP without a gate has no rows for gate_proj. Matrices of one width lie together, so that a
part has few inputs and no axis is longer than the widest projection. An adapter's factor, alpha / r or another, is
already in the matrices. Without an adapter all inputs are zero, and the program's result is the base model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmill.models.architecture import Architecture, Graph, LayerSpec
from shardmill.models.caches import Shape

MOST_RANK = 64
ADAPTER = "adapter_"  # begins the names of the inputs
DOWN, UP = "A", "B"  # PEFT's names of the two matrices: lora_A, lora_B
Layers = Sequence[tuple[int, LayerSpec]]


@dataclass(frozen=True)
class Factor:
    """A matrix of an adapter: A or B of a projection, which is given by its path in the layer."""

    projection: str
    side: str


@dataclass(frozen=True)
class Stack:
    """The rows of one layer in one input: `rank` rows of `width` numbers for each factor, in order."""

    width: int
    factors: tuple[Factor, ...]


def layer_stacks(g: Graph, kind: LayerSpec) -> dict[str, Stack]:
    """Return what a layer reads of each input, by the input's name; empty for a layer without such projections."""
    g, stacks = g.of(kind), dict[str, Stack]()
    q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
    gate, up, down = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    if kind.mixer == "attention":
        stacks |= {
            "adapter_attn": Stack(g.hidden, (*(Factor(name, DOWN) for name in (q, k, v)), Factor(o, UP))),
            "adapter_query": Stack(g.heads * g.head_dim, (Factor(q, UP), Factor(o, DOWN))),
            "adapter_key_value": Stack(g.kv_heads * g.head_dim, (Factor(k, UP), Factor(v, UP))),
        }
    if kind.ffn == "mlp":
        wide = (gate, up) if g.gated else (up,)
        stacks |= {
            "adapter_mlp": Stack(g.hidden, (*(Factor(name, DOWN) for name in wide), Factor(down, UP))),
            "adapter_ffn": Stack(g.ffn, (*(Factor(name, UP) for name in wide), Factor(down, DOWN))),
        }
    return stacks


def adapted_layers(g: Graph, layers: Layers) -> dict[str, tuple[int, ...]]:
    """Return the layers that have a slice in each input of a part, in order, by the input's name."""
    by_input: dict[str, list[int]] = {}
    for index, kind in layers:
        for name in layer_stacks(g, kind):
            by_input.setdefault(name, []).append(index)
    return {name: tuple(by_input[name]) for name in sorted(by_input)}


def adapter_inputs(g: Graph, layers: Layers, rank: int) -> dict[str, Shape]:
    """Return the inputs of a part for adapters of `rank`, by name, in order; none for rank 0."""
    kinds, shapes = dict(layers), dict[str, Shape]()
    for name, indices in adapted_layers(g, layers).items() if rank else ():
        stack = layer_stacks(g, kinds[indices[0]])[name]
        shapes[name] = (1, len(indices), rank * len(stack.factors), stack.width)
    return shapes


def slices(g: Graph, layers: Layers, rank: int) -> dict[str, Shape]:
    """Return the slices of these inputs by layer: adapter_attn_3 is the slice of layer 3 in adapter_attn."""
    return {
        f"{name}_{index}": (1, 1, *shape[2:])
        for name, shape in adapter_inputs(g, layers, rank).items()
        for index in adapted_layers(g, layers)[name]
    }


def unadaptable(a: Architecture) -> str:
    """Return why a model can have no adapters as inputs; "" if it can."""
    if a.ends is not None:
        return "an encoder has none"
    if any(kind.mixer == "cca" for kind in a.kinds):
        return f"{a.model_type} has convolutions between its projections and its attention"
    if a.graph.recurrence or a.graph.output_gate:
        return f"{a.model_type} has projections of a recurrence, or queries and gates in one matrix"
    if any(kind.shares or kind.key_is_value for kind in a.kinds):
        return f"{a.model_type} has layers without projections for keys or values"
    sizes: dict[str, set[Stack]] = {}
    for kind in a.kinds:
        for name, stack in layer_stacks(a.graph, kind).items():
            sizes.setdefault(name, set()).add(stack)
    if any(len(stacks) > 1 for stacks in sizes.values()):
        return f"{a.model_type} has layers of several sizes"
    return "" if sizes else f"{a.model_type} has no projection that an adapter could change"
