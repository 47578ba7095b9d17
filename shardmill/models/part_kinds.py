"""The kinds of parts: for each what goes into its programs, what comes out, and their weights.

    kind    in                                                          states               out
    layers  x [1, d, T, 1]                                              k_i, v_i, c_i, s_i   hidden [1, d, T, 1]
            rope_cos, rope_sin [T, rope_dim / 2], rope_*_local
            attn_mask [1, 1, T, S], attn_mask_sliding [1, 1, T, W]
            kv_write_mask [1, 1, S, T], kv_write_mask_sliding [1, 1, W, T]
            conv_write_mask [1, 1, T, R], conv_read_mask [1, L - 1, R, T]
            recurrent_read_mask [1, 2 (B + L - 1), R, T]
            recurrent_out_mask [1, 1, T, B], recurrent_keep_mask [1, 1, 1, T]
            embedded [1, d, T, 1], p_i [1, P, T, 1]
            adapter_* [1, n, rows, width]
    experts x [1, d, T, 1], weights [1, experts, T, 1]                  none                 hidden [1, d, T, 1]
    head    hidden [1, d, T, 1]                                         none                 logits [1, rows, T, 1]
    fuse    x [1, n d, T, 1]                                            none                 hidden [1, d, T, 1]
    join    x [1, 2 m + d, T, 1]                                        none                 hidden [1, d, T, 1]
    mtp     x [1, 3 d, T, 1]                                            none                 hidden [1, d, T, 1]
    encoder x [1, d, T, 1]                                              none                 logits [1, rows, T, 1]
            rope_cos, rope_sin [T, rope_dim / 2], rope_*_local                               or hidden [1, d, T, 1]
            attn_mask [1, 1, T, T], attn_mask_sliding [1, 1, T, T]
            embedded [1, d, T, 1]
    tower   x [1, ., T, 1], positions [1, ., T, 1]                      none                 hidden [1, d, T / ., 1]
            rope_cos, rope_sin [T, rope_dim / 2], key_mask [1, 1, 1, T]
            or x [., 1, ., .], positions [1, ., 1, .], key_mask

contract.py says what the letters and the arrays mean. A part of kind "fuse" projects the n taps of a token to d
channels. A part of kind "join" makes the stream of a drafter of another width than the model's m. Its x has a token's
embedding, then the model's last hidden state, then the drafter's own: the host gives zeros for one of the two, which
adds nothing. A part of kind "mtp" takes the same x for a drafter of the model's width, and norms and projects it in
another way. A part of kind "labels" is a head. A tower's inputs have their sizes in numbers (models/tower.py).

Planning reads this table without torch. The modules themselves are in parts.py; `parts.MODULES` has them by the same
keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardmill.models.adapters import adapted_layers, adapter_inputs, slices
from shardmill.models.architecture import OF_TOWER, Architecture, EncoderIO
from shardmill.models.caches import RING, Shape, T
from shardmill.models.contract import (
    BLOCK,
    DECAY_SCALE,
    MODEL_NORM,
    ORDER,
    PER_LAYER,
    GraphSpec,
    caches,
    lent_caches,
    new_name,
    rope_inputs,
    states,
    tap_name,
)
from shardmill.models.interface import LABELS, TOWER
from shardmill.models.layer_constants import group_constants, layer_constants, mixer_constants, norm_constants
from shardmill.models.mixers import projection_constants
from shardmill.models.tower import TowerArchitecture, constants_of_tower, inputs_of_tower

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Shapes = dict[str, Shape]
Declared = Callable[[GraphSpec], Shapes]  # shapes by name, in order


@dataclass(frozen=True)
class PartKind:
    """What conversion, engine, gates and manifest must know of a kind of part.

    Attributes:
        inputs: what goes into a program beside an adapter's matrices; T stands for the token axis.
        constants: the weights of a program by their path in it.
        output: the name of its first output.
        holds: what a person reads: its rows, or its layers.
        streams: whether its input and its output have the residual stream's scale; otherwise the model's units.
        by_layer: whether it is converted layer by layer. Otherwise coremltools converts it whole.
        joins: of a drafter's first program, whether its x has a token's embedding and the drafter's own state beside
            what the model computed. A draft then runs it for each token.
    """

    inputs: Declared
    constants: Declared
    output: str = "hidden"
    holds: str = "channels"
    streams: tuple[bool, bool] = (True, True)
    by_layer: bool = False
    joins: bool = False


def _layers_inputs(spec: GraphSpec) -> Shapes:
    g, shapes = spec.graph, _attention_inputs(spec)
    shapes |= {spec.write_mask(name): (1, 1, spec.slots_of(name), T) for name in spec.written_masks}
    if spec.convolves:
        shapes |= {"conv_write_mask": (1, 1, T, RING), "conv_read_mask": (1, g.conv_taps - 1, RING, T)}
    if spec.recurs and g.recurrence:
        shapes |= {"conv_write_mask": (1, 1, T, RING)}
        shapes |= {"recurrent_read_mask": (1, 2 * (BLOCK + g.recurrence.taps - 1), RING, T)}
        shapes |= {"recurrent_out_mask": (1, 1, T, BLOCK), "recurrent_keep_mask": (1, 1, 1, T)}
    if g.per_layer:
        shapes["embedded"] = (1, g.hidden, T, 1)
    shapes |= lent_caches(spec)
    hosted = caches(spec) if spec.hosted else {}
    for i, _ in spec.layers:
        shapes |= {name: shape for name, shape in hosted.items() if name.endswith(f"_{i}")}
        shapes |= {f"p_{i}": (1, g.per_layer, T, 1)} if g.per_layer else {}
    return shapes


def _attention_inputs(spec: GraphSpec) -> Shapes:
    """Return what layers take that see one another's tokens: the stream, rotary tables and masks."""
    g, paired = spec.graph, any(kind.paired for _, kind in spec.layers[:1])
    shapes: Shapes = {"x": (1, (2 if paired else 1) * g.hidden + g.carry, T, 1)}
    for name in spec.ropes:
        half = next(g.of(kind).rope_dim for _, kind in spec.layers if kind.rope == name) // 2
        shapes |= dict.fromkeys(rope_inputs(name), (T, half))
    return shapes | {name: (1, 1, T, spec.slots_of(name)) for name in spec.masks}


def _encoder_inputs(spec: GraphSpec) -> Shapes:
    """Return what a part of an encoder takes; the first part's x is the tokens' embedding."""
    later = bool(spec.graph.per_layer) and spec.layers[0][0] > 0
    return _attention_inputs(spec) | ({"embedded": (1, spec.graph.hidden, T, 1)} if later else {})


def _layers_constants(spec: GraphSpec) -> Shapes:
    g = spec.graph
    return {f"layers.{i}.{role}": shape for i, kind in spec.layers for role, shape in mixer_constants(g, kind).items()}


def _encoder_constants(spec: GraphSpec) -> Shapes:
    g, ends = spec.graph, spec.ends
    assert ends is not None
    return {
        **(norm_constants("embed_norm", g) if ends.embed_norm else {}),
        **_layers_constants(spec),
        **(norm_constants("norm", g) if ends.final_norm else {}),
        **(projection_constants("dense", g.hidden, g.hidden, ends.dense_bias) if ends.dense else {}),
        **(norm_constants("dense_norm", g) if ends.dense_norm else {}),
        **(projection_constants("projection", ends.project, g.hidden, False) if ends.project else {}),
        **(projection_constants("classifier", spec.label_rows, g.hidden, ends.label_bias) if ends.labels else {}),
    }


def _head_constants(spec: GraphSpec) -> Shapes:
    g = spec.graph
    return norm_constants("norm", g) | projection_constants("lm_head", spec.rows, g.hidden, g.head_bias)


def _join_constants(spec: GraphSpec) -> Shapes:
    g, width = spec.graph, spec.rows
    return {
        f"{MODEL_NORM}.weight": (width,),
        **norm_constants("norm", g),
        **projection_constants("post_projection", width, g.hidden, False),
        **projection_constants("pre_projection", g.hidden, 2 * width, False),
    }


def _mtp_constants(spec: GraphSpec) -> Shapes:
    width = spec.graph.hidden
    norms = (MODEL_NORM, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    gains: Shapes = {f"{name}.weight": (width,) for name in norms}
    return gains | projection_constants("fc", width, 2 * width, False)


HEAD = PartKind(
    lambda spec: {"hidden": (1, spec.graph.hidden + spec.graph.carry, T, 1)},
    _head_constants,
    output="logits",
    holds="rows",
    streams=(True, False),
)
PART_KINDS = {
    "layers": PartKind(_layers_inputs, _layers_constants, holds="layers", by_layer=True),
    "experts": PartKind(
        lambda spec: {"x": (1, spec.graph.hidden, T, 1), "weights": (1, spec.rows, T, 1)},
        lambda spec: group_constants(spec.graph, spec.rows),
        holds="experts",
        streams=(False, False),
    ),
    "head": HEAD,
    LABELS: HEAD,  # with rows of some tokens
    "encoder": PartKind(_encoder_inputs, _encoder_constants, holds="layers"),
    "fuse": PartKind(
        lambda spec: {"x": (1, spec.rows * spec.graph.hidden, T, 1)},
        lambda spec: projection_constants("fc", spec.graph.hidden, spec.rows * spec.graph.hidden, False),
        holds="taps",
    ),
    "join": PartKind(lambda spec: {"x": (1, 2 * spec.rows + spec.graph.hidden, T, 1)}, _join_constants, joins=True),
    "mtp": PartKind(lambda spec: {"x": (1, 3 * spec.graph.hidden, T, 1)}, _mtp_constants, joins=True),
    TOWER: PartKind(inputs_of_tower, constants_of_tower, holds="layers", streams=(False, False)),
}


def pass_inputs(spec: GraphSpec) -> Shapes:
    """Return the inputs of a program without adapters' matrices, by name, in order; T stands for the token axis."""
    return PART_KINDS[spec.kind].inputs(spec)


def inputs(spec: GraphSpec) -> Shapes:
    """Return the inputs of a program by name, in order."""
    return {**pass_inputs(spec), **adapter_inputs(spec.graph, spec.layers, spec.calls.adapters)}


def traced_inputs(spec: GraphSpec) -> Shapes:
    """Return the inputs of a part's PyTorch module, which takes an adapter's matrices layer by layer."""
    return {**pass_inputs(spec), **slices(spec.graph, spec.layers, spec.calls.adapters)}


def output(spec: GraphSpec) -> str:
    """Return the name of a program's first output."""
    return "logits" if spec.label_rows else PART_KINDS[spec.kind].output


def constants(spec: GraphSpec) -> Shapes:
    """Return the weights of a program by their path in it, in order, with their shapes."""
    return PART_KINDS[spec.kind].constants(spec)


def interface(spec: GraphSpec) -> dict[str, Any]:
    """Return what goes into a program, what it keeps and what comes out; "T" stands for the token axis."""
    named = {name: ["T" if extent == T else extent for extent in shape] for name, shape in inputs(spec).items()}
    entry: dict[str, Any] = {
        "inputs": named,
        "states": {name: list(shape) for name, shape in states(spec).items()},
        "output": output(spec),
    }
    if spec.hosted and caches(spec):
        entry["written"] = {name: new_name(name) for name in caches(spec)}
    if spec.lent:
        entry["lent"] = list(lent_caches(spec))
    if spec.taps:
        entry["taps"] = {tap_name(layer): layer for layer in spec.taps}
    if spec.calls.adapters:
        layers = adapted_layers(spec.graph, spec.layers)
        entry["adapters"] = {name: list(indices) for name, indices in layers.items()}
    if functions := spec.calls.named:
        entry["functions"] = functions
    if spec.calls.contexts:
        entry["contexts"] = {str(slots): _shorter(spec, slots) for slots in spec.calls.contexts}
    return entry


def _shorter(spec: GraphSpec, slots: int) -> dict[str, Any]:
    """Return the functions for a shorter context, and the inputs and states that have other shapes there."""
    whole = replace(spec, calls=replace(spec.calls, contexts=()))
    short, long = interface(replace(whole, slots=slots)), interface(whole)
    shapes = {
        key: {name: shape for name, shape in short[key].items() if shape != long[key][name]}
        for key in ("inputs", "states")
    }
    return {"functions": {str(width): name for width, name in spec.calls.shorter[slots].items()}, **shapes}


def whole_spec(a: Architecture) -> GraphSpec:
    """Return the spec of a program with all layers."""
    return GraphSpec("encoder" if a.ends else "layers", a.graph, tuple(enumerate(a.kinds)), ends=a.ends)


def encoder_spec(a: Architecture, start: int, end: int) -> GraphSpec:
    """Return the spec of an encoder's part with the layers [start, end).

    What comes before the layers is in the first part, what comes after them in the last one.
    """
    assert a.ends is not None
    ends = replace(a.ends if end == a.layers else EncoderIO(), embed_norm=a.ends.embed_norm and start == 0)
    whole = whole_spec(a)
    return replace(whole, layers=whole.layers[start:end], ends=ends)


def tower_spec(tower: TowerArchitecture, size: int) -> GraphSpec:
    """Return the spec of a tower's program for a bucket of patches or frames."""
    return GraphSpec(TOWER, tower.graph, tower.kinds, tower=tower.io, tokens=tower.io.tokens(size))


def tower_constants(a: Architecture) -> Shapes:
    """Return the weights of a model's tower by their paths in the model; empty without one."""
    shapes = constants(tower_spec(a.tower, a.tower.io.merged)) if a.tower else {}
    return {f"{OF_TOWER}{path}": shape for path, shape in shapes.items()}


def table_constants(a: Architecture) -> Shapes:
    """Return the host's tables by path, with their shapes; row `token * layers + i` of PER_LAYER is for layer i."""
    rows = {"embedding": a.vocab, "positions": a.positions, "types": a.types}
    tables: Shapes = {path: (count, a.graph.hidden) for path, count in rows.items() if count}
    second = a.graph.per_layer and a.graph.per_layer_table
    return tables | ({PER_LAYER: (a.vocab * a.layers, a.graph.per_layer)} if second else {})


def model_constants(a: Architecture) -> Shapes:
    """Return the weights of all programs and the host's tables by path, with their shapes."""
    head = {} if a.ends else constants(GraphSpec("head", a.graph, rows=a.vocab))
    layers = {
        f"layers.{i}.{role}": shape
        for i, kind in enumerate(a.kinds)
        for role, shape in layer_constants(a.graph, kind).items()
    }
    return constants(whole_spec(a)) | layers | head | table_constants(a) | tower_constants(a)


def computed(spec: GraphSpec) -> dict[str, NDArray[np.float32]]:
    """Return constants that no checkpoint decides, by their path, in the shapes that programs use."""
    import numpy as np  # every command imports this module, and few need arrays

    arrays: dict[str, NDArray[np.float32]] = {}
    if spec.routes and spec.graph.experts:
        arrays[ORDER] = np.arange(spec.graph.experts.classes, 0, -1, dtype=np.float32).reshape(1, -1, 1, 1)
    if spec.recurs and (sizes := spec.graph.recurrence):
        i, j = np.mgrid[0:BLOCK, 0:BLOCK]
        both = np.concatenate([i >= j, j > i])  # up to token i, and after it
        triangles = {"causal": i >= j, "later": i > j}
        triangles |= {"later_decays": (i > j) / DECAY_SCALE, "decay_sums": both / DECAY_SCALE}
        arrays |= {name: triangles[name].astype(np.float32)[None, None] for name in sizes.triangles}
    return arrays


def stem(path: str) -> str:
    """Return coremltools' name of a constant: its path in the PyTorch module, spelled as an identifier."""
    return path.replace(".", "_")
