"""The gate of towers: it passes what is right, and each mistake that others have made fails a number.

A wrong graph is computed by the PyTorch module in the program's place, with the weights of a real package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
import tiny
import torch
import towers
from torch import Tensor

from shardmill.errors import GateError
from shardmill.gates import measurement
from shardmill.gates import tower as gates
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable
from shardmill.models.contract import GraphSpec
from shardmill.models.part_kinds import inputs
from shardmill.models.parts import TowerPart, build
from shardmill.plan import Part
from shardmill.runtime import tower as runtime
from shardmill.runtime.kv import Floats

BUCKETS = [32, 64]
DEPTH, LONGEST = towers.VISION["qwen3_5"]["depth"], 2 * 3 * towers.PATCH**2  # a patch's numbers in two frames
IN_FP32 = pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
Arrays = dict[str, Floats]
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Made:
    """A tower's packages with all that the gate is given."""

    source: Path
    folder: Path
    parts: Mapping[str, Part]
    rules: Mapping[str, Any]

    def stored(self, name: str) -> PackageWeights:
        return PackageWeights(self.folder / f"{name}.mlpackage", self.parts[name])

    def judged(self, name: str) -> dict[str, float]:
        """The verdict's numbers by name and detail. Raises GateError if one missed its limit."""
        part, program = self.parts[name], self.folder / f"{name}.mlpackage"
        rows = measurement.compare(gates.tower_parity(program, part, self.rules, self.source, self.stored(name)))
        measurement.demand("parity", rows)
        return {f"{row['name']} {row['detail']}": row["value"] for row in rows}


def made_of(kind: str, folder: Path) -> Made:
    source = tiny.fetched(towers.write_pictured(folder / "checkpoint", kind), folder / "source")
    parts, plan = tiny.split(source, topology="auto", head={"slices": "auto"}, images={"patches": towers.BUCKETS[kind]})
    chosen = {name: part for name, part in parts.items() if part.kind == "tower"}
    for name, part in chosen.items():
        tiny.convert(part, source, folder / f"{name}.mlpackage")
    return Made(source, folder, chosen, plan["tower"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_of("qwen3_5", tmp_path_factory.mktemp("tower"))


@IN_FP32
def test_rows_are_transformers_in_every_bucket(made: Made) -> None:
    for name in made.parts:
        found = made.judged(name)
        whole = [detail for detail in found if detail.startswith("tower_error")]
        assert len(whole) == 3 and "faint_error faint" in found
        assert all(found[detail] > 0 for detail in whole)  # the gate has judged how large they are


@IN_FP32
@pytest.mark.parametrize("kind", [kind for kind in towers.VISION if kind != "qwen3_5"])
def test_rows_of_other_towers_are_transformers_too(kind: str, tmp_path: Path) -> None:
    other = made_of(kind, tmp_path)
    for name in other.parts:
        assert other.judged(name)


class Graph:
    """A part's graph in PyTorch, called as its program is."""

    def __init__(self, spec: GraphSpec, weights: Weights) -> None:
        self.module, self.names = build(spec, weights), list(inputs(spec))

    @torch.no_grad()
    def __call__(self, arrays: Mapping[str, Floats]) -> Floats:
        found: Tensor = self.module(*(torch.from_numpy(arrays[name].copy()) for name in self.names))
        return found.numpy()


@dataclass(frozen=True)
class Mutant:
    """A mistake: in the graph, in its weights, in the rules of the host, or in the host's arrays."""

    graph: Callable[[GraphSpec], GraphSpec] = lambda spec: spec
    weights: Callable[[dict[str, Tensor]], object] = lambda weights: None
    rules: Callable[[dict[str, Any]], dict[str, Any]] = lambda rules: rules
    arrays: Callable[[Arrays], object] = lambda arrays: None


def _options(**changes: Any) -> Callable[[GraphSpec], GraphSpec]:
    return lambda spec: replace(spec, graph=replace(spec.graph, **changes))


def _connector(activation: str) -> Callable[[GraphSpec], GraphSpec]:
    def change(spec: GraphSpec) -> GraphSpec:
        assert spec.tower is not None
        first, *others = spec.tower.connector
        steps = (replace(first, activation=activation), *others)
        return replace(spec, tower=replace(spec.tower, connector=steps))

    return change


def _by_tanh(spec: GraphSpec) -> GraphSpec:
    """Every activation of the connector by tanh."""
    assert spec.tower is not None
    steps = tuple(replace(step, activation=step.activation and "gelu_tanh") for step in spec.tower.connector)
    return replace(spec, tower=replace(spec.tower, connector=steps))


def _spoilt(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A change of one of some weights, or of one of the host's arrays."""

    def spoil(values: Any) -> None:
        values[name] = change(values[name])

    return spoil


def _rope(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda rules: rules | {"rope": rules["rope"] | change(rules["rope"])}


def _positions(rule: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda rules: rules | {"positions": rules["positions"] | {"rule": rule}}


def _as_patch(weight: Tensor) -> Tensor:
    """[d, colours, frames, P, P]"""
    return weight.reshape(len(weight), 3, 2, towers.PATCH, towers.PATCH)


def _flat(weight: Tensor) -> Tensor:
    return weight.reshape(len(weight), -1)


def _neighbours(weight: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    """The first projection after the merging, for other orders of the neighbours' channels."""
    return order(weight.reshape(len(weight), 2, 2, -1)).reshape(weight.shape)


def _raster(name: str) -> Callable[[Arrays], None]:
    """An array of patches that come row by row over the whole image."""

    def spoil(arrays: Arrays) -> None:
        count = int((arrays["key_mask"] == 0).sum())
        (grid,) = {grid for grid in LAID if grid[0] * grid[1] == count}
        order = np.argsort(np.array([row * grid[1] + column for row, column in runtime.places(grid, 2)]))
        axis = 2 if arrays[name].ndim == 4 else 0
        moved = np.take(arrays[name], order, axis)
        arrays[name][(slice(None),) * axis + (slice(0, count),)] = moved

    return spoil


LAID: set[tuple[int, int]] = set()  # the grids of the images that a test lays out


def _nearest(at: Any, extent: int, side: int) -> Floats:
    source = np.floor(at * (side - 1) / max(extent - 1, 1) + 0.5).astype(int)
    return np.eye(side, dtype=np.float32)[source]


def _unaligned(at: Any, extent: int, side: int) -> Floats:
    source = np.clip((at + 0.5) * side / extent - 0.5, 0, side - 1)
    floor = np.floor(source).astype(int)
    rest = (source - floor)[:, None]
    up = np.eye(side)[np.minimum(floor + 1, side - 1)]
    found: Floats = (np.eye(side)[floor] * (1 - rest) + up * rest).astype(np.float32)
    return found


MUTANTS = {
    "epsilon of 1e-5": (Mutant(_options(rms_norm_eps=1e-5)), "faint_error"),
    "GELU itself in the layers": (Mutant(_options(activation="gelu")), "tower_error"),
    "GELU by tanh in the connector": (Mutant(_connector("gelu_tanh")), "tower_error"),
    "no activation in the connector": (Mutant(_connector("")), "tower_error"),
    "RMS norms": (Mutant(_options(norm="rms", norm_bias=False)), "tower_error"),
    "scores divided by another root": (Mutant(_options(attention_scale=64**-0.5)), "tower_error"),
    "one frame's kernel": (
        Mutant(weights=_spoilt("patch.weight", lambda w: _flat(_as_patch(w) * torch.tensor([2.0, 0])[:, None, None]))),
        "tower_error",
    ),
    "no bias of keys, which are turned": (
        Mutant(weights=_spoilt("layers.1.self_attn.k_proj.bias", lambda bias: bias * 0)),
        "tower_error",
    ),
    "a patch turned over": (
        Mutant(weights=_spoilt("patch.weight", lambda w: _flat(_as_patch(w).transpose(3, 4)))),
        "tower_error",
    ),
    "blue first": (Mutant(weights=_spoilt("patch.weight", lambda w: _flat(_as_patch(w).flip(1)))), "tower_error"),
    "colours last": (
        Mutant(arrays=_spoilt("x", lambda x: x.reshape(6, -1, *x.shape[2:]).swapaxes(0, 1).reshape(x.shape))),
        "tower_error",
    ),
    "neighbours down before across": (
        Mutant(weights=_spoilt("linear_fc1.weight", lambda w: _neighbours(w, lambda n: n.transpose(1, 2)))),
        "tower_error",
    ),
    "neighbours' channels in turn": (
        Mutant(weights=_spoilt("linear_fc1.weight", lambda w: _neighbours(w, lambda n: n.permute(0, 3, 1, 2)))),
        "tower_error",
    ),
    "rows turned as columns": (Mutant(rules=_rope(lambda r: {"axes": [1 - a for a in r["axes"]]})), "tower_error"),
    "no rotation": (Mutant(rules=_rope(lambda r: {"inv_freq": [0.0 for _ in r["inv_freq"]]})), "tower_error"),
    "another base of the rotation": (
        Mutant(rules=_rope(lambda r: {"inv_freq": [f**1.5 for f in r["inv_freq"]]})),
        "tower_error",
    ),
    "positions of the nearest patch": (Mutant(rules=_positions("nearest")), "tower_error"),
    "corners not aligned": (Mutant(rules=_positions("unaligned")), "tower_error"),
    "positions row by row": (Mutant(arrays=_raster("positions")), "tower_error"),
    "patches row by row": (Mutant(arrays=_raster("x")), "tower_error"),
    "rotation row by row": (Mutant(arrays=_raster("rope_cos")), "tower_error"),
    "what fills the bucket is seen": (Mutant(arrays=_spoilt("key_mask", lambda mask: mask * 0)), "tower_error"),
}  # fmt: skip


def computed(made: Made, mutant: Mutant, monkeypatch: pytest.MonkeyPatch, name: str = "tower_64") -> dict[str, float]:
    """The verdict's numbers with a mistake."""
    part, stored = made.parts[name], made.stored(name)
    weights = {path: stored.values(path).reshape(shape) for path, shape in part.shapes.items()}
    mutant.weights(weights)
    arrays = runtime.tower_arrays

    def spoilt(rules: Mapping[str, Any], bucket: int, columns: Floats, grid: runtime.Grid) -> Arrays:
        LAID.add(grid)
        found = arrays(mutant.rules(dict(rules)), bucket, columns, grid)
        mutant.arrays(found)
        return found

    monkeypatch.setattr(runtime, "RULES", {**runtime.RULES, "nearest": _nearest, "unaligned": _unaligned})
    monkeypatch.setattr(gates, "Program", lambda *_: Graph(mutant.graph(part.spec), weights))
    monkeypatch.setattr(gates, "tower_arrays", spoilt)
    return made.judged(name)


@pytest.mark.thorough(
    but=[
        "epsilon of 1e-5",
        "GELU itself in the layers",
        "GELU by tanh in the connector",
        "scores divided by another root",
        "no bias of keys, which are turned",
        "blue first",
        "neighbours' channels in turn",
        "rows turned as columns",
        "positions of the nearest patch",
        "corners not aligned",
        "rotation row by row",
        "what fills the bucket is seen",
    ]
)
@IN_FP32
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_fails_the_number_that_is_there_for_it(
    name: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant, number = MUTANTS[name]
    with pytest.raises(GateError, match=number):
        computed(made, mutant, monkeypatch)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_of("lfm2_vl", tmp_path_factory.mktemp("flat"))


# The connector's norm follows a norm, so no image makes its epsilon of 1e-5 count: 1e-6 changes a row by 5e-6.
MUTANTS_OF_FLAT = {
    "positions between corners": (Mutant(rules=_positions("bilinear")), "tower_error"),
    "positions without antialiasing": (Mutant(rules=_positions("unaligned")), "tower_error"),
    "colour after colour": (
        Mutant(rules=lambda rules: {name: rule for name, rule in rules.items() if name != "colours"}),
        "tower_error",
    ),
    "GELU by tanh in the connector": (
        Mutant(_by_tanh),
        "tower_error",
    ),
    "no norm in the connector": (
        Mutant(weights=_spoilt("layer_norm.weight", lambda gain: gain * 0 + 1)),
        "tower_error",
    ),
    "positions row by row": (Mutant(arrays=_raster("positions")), "tower_error"),
    "patches row by row": (Mutant(arrays=_raster("x")), "tower_error"),
    "what fills the bucket is seen": (Mutant(arrays=_spoilt("key_mask", lambda mask: mask * 0)), "tower_error"),
}  # fmt: skip


@IN_FP32
@pytest.mark.parametrize("name", MUTANTS_OF_FLAT)
def test_a_mistake_of_a_tower_without_a_convolution_fails_the_number_that_is_there_for_it(
    name: str, flat: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant, number = MUTANTS_OF_FLAT[name]
    with pytest.raises(GateError, match=number):
        computed(flat, mutant, monkeypatch)


@IN_FP32
def test_what_is_no_mistake_passes(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    assert computed(made, Mutant(), monkeypatch)


@IN_FP32
@pytest.mark.parametrize(("kind", "part"), [("smolvlm", "tower_36"), ("lfm2_vl", "tower_64")])
def test_a_bias_of_keys_is_no_mistake_where_nothing_turns_them(
    kind: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds the same to every score of a query, which no softmax sees."""
    mutant = Mutant(weights=_spoilt("layers.1.self_attn.k_proj.bias", lambda bias: bias * 0))
    assert computed(made_of(kind, tmp_path), mutant, monkeypatch, part)


def test_a_mask_of_one_row_is_every_query_s_when_scores_are_cut(made: Made) -> None:
    """With 1,024 patches and more the queries are multiplied in pieces; here with as few as the pieces allow."""
    part, stored = made.parts["tower_32"], made.stored("tower_32")
    weights = {path: stored.values(path).reshape(shape) for path, shape in part.shapes.items()}
    whole, cut = Graph(part.spec, weights), Graph(part.spec, weights)
    assert isinstance(cut.module, TowerPart)
    cut.module.spec = PiecesSpec(**vars(part.spec))
    columns = np.random.default_rng(1).standard_normal((3 * towers.PATCH**2, 24)).astype(np.float32)
    arrays = runtime.tower_arrays(made.rules, 32, columns, (4, 6))
    limits.numbers_agree("in pieces", cut(arrays), whole(arrays), limits.model(DEPTH, LONGEST))


class PiecesSpec(GraphSpec):
    """A spec whose queries are multiplied by the keys five at a time."""

    def rows_at_once(self, kind: Any) -> int:
        return 5
