"""The constants of each kind of program by their path, and the host's tables, with their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardmill.models.architecture import Architecture, EncoderIO
from shardmill.models.caches import Shape
from shardmill.models.contract import BLOCK, DECAY_SCALE, MODEL_NORM, ORDER, PER_LAYER, GraphSpec
from shardmill.models.layer_constants import group_constants, layer_constants, mixer_constants, norm_constants
from shardmill.models.mixers import projection_constants

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def constants(spec: GraphSpec) -> dict[str, Shape]:
    """Return the weights of a program by their path in it, in order, with their shapes."""
    g = spec.graph
    if spec.kind == "head":
        return norm_constants("norm", g) | projection_constants("lm_head", spec.rows, g.hidden, g.head_bias)
    if spec.kind == "experts":
        return group_constants(g, spec.rows)
    if spec.kind == "fuse":
        return projection_constants("fc", g.hidden, spec.rows * g.hidden, False)
    if spec.kind == "join":
        return {
            f"{MODEL_NORM}.weight": (spec.rows,),
            **norm_constants("norm", g),
            **projection_constants("post_projection", spec.rows, g.hidden, False),
            **projection_constants("pre_projection", g.hidden, 2 * spec.rows, False),
        }
    if spec.kind == "mtp":
        norms = (MODEL_NORM, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        found = {f"{name}.weight": (g.hidden,) for name in norms}
        return found | projection_constants("fc", g.hidden, 2 * g.hidden, False)
    layers = {
        f"layers.{i}.{role}": shape for i, kind in spec.layers for role, shape in mixer_constants(g, kind).items()
    }
    return layers if spec.ends is None else _around(layers, spec, spec.ends)


def _around(layers: Mapping[str, Shape], spec: GraphSpec, ends: EncoderIO) -> dict[str, Shape]:
    """Return the weights of an encoder's program, given the weights of its layers."""
    g, found = spec.graph, dict(layers)
    if ends.embed_norm:
        found = norm_constants("embed_norm", g) | found
    if ends.final_norm:
        found |= norm_constants("norm", g)
    if ends.dense:
        found |= projection_constants("dense", g.hidden, g.hidden, ends.dense_bias)
    if ends.dense_norm:
        found |= norm_constants("dense_norm", g)
    if ends.project:
        found |= projection_constants("projection", ends.project, g.hidden, False)
    return found | (
        projection_constants("classifier", spec.label_rows, g.hidden, ends.label_bias) if ends.labels else {}
    )


def whole_spec(a: Architecture) -> GraphSpec:
    """Return the spec of a program with all layers; for an encoder, this is the spec of each part."""
    layers = tuple(enumerate(a.kinds))
    return GraphSpec("encoder", a.graph, layers, ends=a.ends) if a.ends else GraphSpec("layers", a.graph, layers)


def table_constants(a: Architecture) -> dict[str, Shape]:
    """Return the host's tables by path, with their shapes; row `token * layers + i` of PER_LAYER is for layer i."""
    found: dict[str, Shape] = {"embedding": (a.vocab, a.graph.hidden)}
    named = {"positions": a.positions, "types": a.types}
    found |= {path: (rows, a.graph.hidden) for path, rows in named.items() if rows}
    second = a.graph.per_layer and a.graph.per_layer_table
    return found | ({PER_LAYER: (a.vocab * a.layers, a.graph.per_layer)} if second else {})


def model_constants(a: Architecture) -> dict[str, Shape]:
    """Return the weights of all programs and the host's tables by path, with their shapes."""
    head = {} if a.ends else constants(GraphSpec("head", a.graph, rows=a.vocab))
    layers = {
        f"layers.{i}.{role}": shape
        for i, kind in enumerate(a.kinds)
        for role, shape in layer_constants(a.graph, kind).items()
    }
    return constants(whole_spec(a)) | layers | head | table_constants(a)


def computed(spec: GraphSpec) -> dict[str, NDArray[np.float32]]:
    """Return constants that no checkpoint decides, by their path, in the shapes that programs use."""
    import numpy as np  # every command imports this module, and few need arrays

    found: dict[str, NDArray[np.float32]] = {}
    if spec.routes and spec.graph.experts:
        found[ORDER] = np.arange(spec.graph.experts.classes, 0, -1, dtype=np.float32).reshape(1, -1, 1, 1)
    if spec.recurs:
        i, j = np.mgrid[0:BLOCK, 0:BLOCK]
        both = np.concatenate([i >= j, j > i])  # up to token i, and after it
        scaled = {"later_decays": (i > j) / DECAY_SCALE, "decay_sums": both / DECAY_SCALE}
        named = {"causal": i >= j} | ({"later": i > j} if spec.graph.delta else {}) | scaled
        found |= {name: values.astype(np.float32)[None, None] for name, values in named.items()}
    return found


def stem(path: str) -> str:
    """Return coremltools' name of a constant: its path in the PyTorch module, spelled as an identifier."""
    return path.replace(".", "_")
