"""Towers by the `model_type` of the whole model: one file for each, which describes its tower in a few lines.

What these descriptions have in common is here. The host makes a program's inputs by the rules in `host`, which
model.json has under `tower`, and knows no family: runtime/tower.py explains the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from math import isqrt
from pathlib import Path
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models.architecture import OF_TOWER, Graph, ModelDescription, Sources, TensorSource
from shardmill.models.encoder import encoder_activation
from shardmill.models.hf_config import load_whole_config
from shardmill.models.part_kinds import tower_spec
from shardmill.models.tower import (
    COLOURS,
    TABLE,
    Step,
    TowerArchitecture,
    TowerDescription,
    TowerIO,
    constants_of_tower,
)

LAST = "last"  # where a pixel's colours stand side by side
QKV = "qkv"
ROWS, COLUMNS = 0, 1  # the axes of a patch's place
TIME, HEIGHT, WIDTH = 0, 1, 2  # the axes of a row's position in the decoder
MOST = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "layers": 1 << 9, "places": 1 << 16}  # that are believed


def supported_towers() -> tuple[str, ...]:
    """Return every model_type whose tower can be built, sorted."""
    return tuple(sorted(file.stem for file in Path(__file__).parent.glob("[!_]*.py")))


def describe_tower(config: Any, key: str = "images") -> TowerDescription:
    """Return the description of the tower of a transformers config, as `load_whole_config` returns it.

    Args:
        config: transformers' config of the whole model.
        key: of the build's config, which asks for a tower: images or audio.

    Raises:
        CheckpointError: if no tower of such a model can be built.
    """
    if config.model_type not in supported_towers():
        known = ", ".join(supported_towers())
        raise CheckpointError(f"{key}: {config.model_type!r} has no tower that can be built; these have: {known}")
    try:
        tower: TowerDescription = import_module(f"{__name__}.{config.model_type}").describe(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        field = "audio_config" if hasattr(config, "audio_config") else "vision_config"
        raise CheckpointError(
            f"config.json: a field of {field} is null, or of an unexpected type ({type(error).__name__}: {error})"
        ) from error
    other = "images" if tower.architecture.io.convolutions is None else "audio"
    if key != other:
        raise CheckpointError(f"{key}: the tower of {config.model_type!r} is for {other}; write `{other}`")
    return tower


def with_tower(model: ModelDescription, folder: Path, key: str = "images") -> ModelDescription:
    """Return a model with the tower of its checkpoint, whose config.json lies in `folder`; see `describe_tower`.

    Raises:
        CheckpointError: if no tower of such a model can be built, or its rows are no embeddings of this decoder.
    """
    a, tower = model.architecture, describe_tower(load_whole_config(folder), key)
    if tower.architecture.io.width != a.graph.hidden:
        rows, width = tower.architecture.io.width, a.graph.hidden
        raise CheckpointError(f"config.json: the tower gives rows of {rows}, the decoder's width is {width}")
    host = {**tower.architecture.host, "scale": a.graph.stream_scale}
    sources, others = (
        {f"{OF_TOWER}{path}": source for path, source in each.items()} for each in (tower.sources, tower.others)
    )
    return replace(
        model,
        architecture=replace(a, tower=replace(tower.architecture, host=host)),
        sources={**model.sources, **sources},
        others={**model.others, **others},
    )


def encoder_tower(
    v: Any,
    prefix: str,
    layer: str,
    names: Mapping[str, str],
    *,
    layers: int,
    heads: int,
    eps: float,
    merge: int,
    places: int,
    rule: str,
    connector: Sequence[Step],
    elsewhere: Mapping[str, str] | None = None,
    frames: int = 0,
    flat: bool = False,
    older: str = "",
    rope: Mapping[str, Any] | None = None,
    host: Mapping[str, Any] | None = None,
) -> TowerDescription:
    """Return the description of a vision transformer with LayerNorms, biases and plain MLPs.

    Args:
        v: transformers' config of the tower.
        prefix: begins the names of the tower's tensors.
        layer: the beginning of the names of a layer's tensors after that, with "{i}" for its index.
        names: of tensors, by the constant's module; without ".weight" and ".bias". If there is one for "qkv", its rows
            are the query's, then the key's, then the value's.
        layers: how many there are.
        heads: of each layer.
        eps: of the norms.
        merge: neighbours a side that become one row.
        places: rows of the table of positions, of as many rows as columns.
        rule: how an image of another size takes its positions from that table, see runtime/tower.py.
        connector: what follows the layers.
        elsewhere: names of tensors outside of `prefix`, by the constant's module.
        frames: how many frames a patch covers, all the same; 0 for a convolution over one image.
        flat: whether a projection takes a patch's pixels, the colours of each side by side, and no convolution.
        older: another beginning of the names of tensors, in checkpoints that lack those with `prefix`.
        rope: what turns the heads, as model.json has it.
        host: what else the host needs.

    Raises:
        CheckpointError: if programs can't be built with these numbers.
    """
    side, patch = _check_sizes(v, layers, heads, merge, places), v.patch_size
    size = v.hidden_size // heads
    graph = Graph(
        hidden=v.hidden_size, heads=heads, kv_heads=heads, head_dim=size, rope_dim=size, ffn=v.intermediate_size,
        rms_norm_eps=eps, qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, norm="layer",
        activation=encoder_activation(v, "hidden_act"),
    )  # fmt: skip
    column = max(frames, 1) * COLOURS * patch * patch
    io = TowerIO(column, places, merged=merge * merge, connector=tuple(connector))
    host_rules = {"patch": patch, "frames": max(frames, 1), "merge": merge, "positions": {"side": side, "rule": rule}}
    host_rules |= {**({"rope": dict(rope)} if rope else {}), **({"colours": LAST} if flat else {}), **(host or {})}
    tower = TowerArchitecture(graph, layers, io, rope is not None, host_rules)
    kernel = None if flat else (v.hidden_size, COLOURS, *([frames] if frames else []), patch, patch)

    def source(path: str, prefix: str = prefix) -> Sources:
        module, _, kind = path.rpartition(".")
        if path == TABLE:
            return TensorSource(f"{prefix}{names[TABLE]}.weight", transposed=True, shape=(places, v.hidden_size))
        if module in (elsewhere or {}):
            return TensorSource(f"{(elsewhere or {})[module]}.{kind}")
        if path.startswith("layers."):
            _, index, role = module.split(".", 2)
            begin, which = f"{prefix}{layer.format(i=index)}", QKV.find(role.removesuffix("_proj")[-1])
            if role in names:
                return TensorSource(f"{begin}{names[role]}.{kind}")
            rows = (which * v.hidden_size, (which + 1) * v.hidden_size, 1)
            shape = (3 * v.hidden_size, v.hidden_size) if kind == "weight" else (3 * v.hidden_size,)
            return TensorSource(f"{begin}{names[QKV]}.{kind}", rows=rows, shape=shape)
        return TensorSource(f"{prefix}{names[module]}.{kind}", shape=kernel if path == "patch.weight" else None)

    paths = [*constants_of_tower(tower_spec(tower, io.merged))]
    others = {path: source(path, older) for path in paths} if older else {}
    return TowerDescription(tower, {path: source(path) for path in paths}, others)


def _check_sizes(v: Any, layers: int, heads: int, merge: int, places: int) -> int:
    """Return the rows of the table of positions, which has as many columns.

    Raises:
        CheckpointError: if programs can't be built with these numbers of `encoder_tower`.
    """
    sizes = {"hidden_size": v.hidden_size, "intermediate_size": v.intermediate_size, "layers": layers, "places": places}
    for name, size in sizes.items():
        if not 1 <= size <= MOST[name]:
            raise CheckpointError(f"vision_config: {name} is {size}: it must be 1 to {MOST[name]}")
    side, colours = isqrt(places), getattr(v, "in_channels", None) or getattr(v, "num_channels", COLOURS)
    if not isinstance(v.patch_size, int) or side * side != places or colours != COLOURS:
        raise CheckpointError("vision_config: programs have square patches of three colours, and a square of positions")
    if v.hidden_size % heads or merge < 1:
        raise CheckpointError(f"vision_config: {heads} heads do not divide hidden_size {v.hidden_size}")
    return side


def check_fractions(side: int) -> int:
    """Return the patches a side of a full tile, if each has the position of its own number.

    transformers finds a patch's position by fractions in fp32, and some sides have two patches with one position. Which
    these are depends on how many numbers a processor adds at once, so nobody else can know them.

    Raises:
        CheckpointError: if some way of adding gives other positions.
    """
    import numpy as np

    fractions = np.arange(1, side, dtype=np.float32) * (np.float32(1) / np.float32(max(side, 1)))
    for lanes in (1, 4, 8, 16):  # torch.arange: exact where a group of numbers begins, then from there
        place = np.arange(side - 1)
        begins = (1 / max(side, 1) * (1 + place // lanes * lanes)).astype(np.float32)
        if ((begins + 1 / max(side, 1) * (place % lanes)).astype(np.float32) > fractions).any():
            raise CheckpointError(
                f"vision_config: images of {side} patches a side have positions that depend on how fp32 rounds"
            )
    return side


def axial_rope(v: Any) -> dict[str, Any]:
    """Return how a patch's row turns the first half of a head's frequencies, and its column the second half."""
    size, base = v.hidden_size // v.num_heads // 2, float(v.rope_parameters["rope_theta"])
    frequencies = [base ** (-i / size) for i in range(0, size, 2)]
    return {"inv_freq": 2 * frequencies, "axes": [axis for axis in (ROWS, COLUMNS) for _ in frequencies]}


def decoder_axes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return which axis of a row's position turns each frequency of the decoder, of `mrope_section` in turn.

    A table with fewer frequencies than the sections have takes the first ones.
    """
    sections = rope.get("mrope_section", (11, 11, 10))
    axes = [
        axis if axis != TIME and i < 3 * sections[axis] else TIME
        for i, axis in enumerate([TIME, HEIGHT, WIDTH] * max(sections))
    ]
    return {"axes": axes[: sum(sections)]}
