"""Layers of any kinds in any order: stamped, they are plain coremltools' byte for byte, one template a kind."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import pytest
import templates
import torch
from models.tiny_configs import BESIDE
from models.tiny_families import write_tiny
from oracle import convert_plain

from shardmill.convert import template, trace
from shardmill.convert.stamped import convert_stamped
from shardmill.convert.weights import PartWeights
from shardmill.gates.weights import PackageWeights
from shardmill.models.contract import GraphSpec
from shardmill.models.interface import GRAPH, HOST, EntryPoints
from shardmill.plan import Part

from .small import layers_part

pytestmark = pytest.mark.usefixtures("unchecked")

# Sliding layers as well as those without rotary embedding: three kinds.
THREE = {
    "num_hidden_layers": 6,
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full", "sliding", "sliding")],
    "no_rope_layers": [1, 1, 0, 1, 0, 1],
}
TWO = {"num_hidden_layers": 4, "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")]}
# Layers of each model: how many, and how many kinds.
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "apertus": ({"num_hidden_layers": 3}, 3, 1),
    "cohere2": ({}, 4, 2),
    "gemma3_text": ({}, 4, 2),
    "gemma4_unified_text": ({}, 4, 2),
    "gpt_oss": (TWO, 4, 2),
    "granitemoehybrid": (BESIDE, 4, 2),
    "lfm2": ({}, 4, 2),
    "lfm2_moe": ({}, 4, 3),
    "mixtral": ({"num_hidden_layers": 3}, 3, 1),
    "qwen3_5_text": ({}, 4, 2),
    "qwen3_5_moe_text": ({}, 4, 2),
    "nemotron": ({"num_hidden_layers": 3}, 3, 1),
    "nemotron_h": ({}, 6, 3),
    "zaya": ({}, 3, 2),
    "smollm3": (THREE, 6, 3),
}


# Models with vectors of fewer than ten numbers, which coremltools writes into the program instead of the weight file.
SHORT: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_attention_heads": 4, "num_local_experts": 5},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 32},
    "lfm2_moe": {"num_experts": 4},
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "zaya": {"num_experts": 5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For checkpoints by their families."""
    return tmp_path_factory.mktemp("kinds")


def whole(folder: Path, name: str) -> Part:
    """All layers of a model as one part."""
    changes, layers, kinds = MODELS[name]
    if not (folder / name).exists():
        write_tiny(name, folder / name, **changes)
    part = layers_part(folder / name, 0, layers)
    assert len({kind for _, kind in part.spec.layers}) == kinds
    return part


def reordered(part: Part, order: list[int], start: int) -> Part:
    """Some of a part's layers in another order, as the model's layers from `start` on."""
    tensors = [
        replace(tensor, path=tensor.path.replace(f"layers.{old}.", f"layers.{start + new}.", 1))
        for new, old in enumerate(order)
        for tensor in part.tensors
        if tensor.path.startswith(f"layers.{old}.")
    ]
    layers = tuple((start + new, part.spec.layers[old][1]) for new, old in enumerate(order))
    return replace(part.changed(layers=layers), tensors=tuple(tensors))


def lanes(names: Iterable[str], fast: str) -> list[Any]:
    """Return each name with a quantization, all but one for the slow lane: coremltools alone takes its time."""
    pairs = zip(names, cycle(["int8", "fp16"]), strict=False)
    return [pytest.param(*pair, marks=[] if pair[0] == fast else [pytest.mark.slow]) for pair in pairs]


def files(package: Path) -> dict[str, bytes]:
    return {f.relative_to(package).as_posix(): f.read_bytes() for f in package.rglob("*") if f.is_file()}


@pytest.mark.parametrize(("name", "quantization"), lanes(MODELS, "gemma3_text"))
def test_any_sequence_of_kinds_is_plain_coremltools_byte_for_byte(
    name: str, quantization: str, folder: Path, tmp_path: Path
) -> None:
    """Drawn sequences; no layer occurs twice, since coremltools would merge its weights."""
    chance, every = random.Random(name), whole(folder, name)
    order = chance.sample(range(every.end), chance.randint(2, 3))
    part = reordered(every, order, chance.randint(0, 40))
    source = folder / name
    convert_plain(part, source, quantization, tmp_path / "plain.mlpackage")
    convert_stamped(part, source, quantization, tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")


@pytest.mark.slow
@pytest.mark.parametrize("state", [GRAPH, HOST])
def test_layers_that_read_the_cache_of_another_are_plain_coremltools_byte_for_byte(
    state: str, folder: Path, tmp_path: Path
) -> None:
    """Each kind of layer reads the cache of the last of its kind before it, with other layers between them."""
    source = write_tiny("gemma4_text", folder / f"gemma4-{state}")
    part = layers_part(source, 2, 8).changed(calls=EntryPoints(state=state))
    assert [part.spec.source(i) for i in range(2, 8)] == [2, 3, 3, 2, 3, 2]
    convert_plain(part, source, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, source, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")


@pytest.mark.slow
def test_layers_that_read_another_part_s_caches_are_plain_coremltools_byte_for_byte(
    folder: Path, tmp_path: Path
) -> None:
    source = write_tiny("gemma4_text", folder / "gemma4-lent")
    before = layers_part(source, 2, 4)
    part = layers_part(source, 4, 8)
    part = part.changed(calls=EntryPoints(state=HOST), lent=before.spec.layers)
    assert [part.spec.source(i) for i in range(4, 8)] == [3, 2, 3, 2]
    convert_plain(part, source, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, source, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "quantization"), lanes(SHORT, "lfm2_moe"))
def test_vectors_too_short_for_the_weight_file_are_plain_coremltools_byte_for_byte(
    name: str, quantization: str, folder: Path, tmp_path: Path
) -> None:
    """Sinks of few heads, biases of few experts, and the order in which a router takes few experts."""
    source = write_tiny(name, folder / f"{name}-short", **SHORT[name])
    part = layers_part(source, 0, 2)
    short = [path for path, shape in part.shapes.items() if prod(shape) < 10]
    convert_plain(part, source, quantization, tmp_path / "plain.mlpackage")
    convert_stamped(part, source, quantization, tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")
    held, given = PackageWeights(tmp_path / "stamped.mlpackage", part), PartWeights(part, source)
    assert short and all(torch.equal(held.stored(path).values, given[path].half()) for path in short)


def test_the_template_of_a_kind_serves_every_sequence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer is converted for each kind, however long the part is and wherever in the model it starts."""
    made: list[object] = []
    original = trace.convert

    def counted(spec: GraphSpec) -> Any:
        made.extend(kind for _, kind in spec.layers)
        return original(spec)

    monkeypatch.setattr(trace, "convert", counted)
    every, cache = whole(folder, "lfm2"), folder / "counted"
    template.template.cache_clear()
    for order, start in (([1, 2, 3], 0), ([2, 0, 1, 3], 41), ([2, 3], 7)):
        template.program(reordered(every, order, start).spec, cache)
    assert sorted(made, key=str) == sorted({kind for _, kind in every.spec.layers}, key=str)
