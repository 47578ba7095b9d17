"""The stream of Qwen3.5's 27B model, which fp16 can't hold, is scaled in the programs, and nothing else changes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import limits
import mtp_layers
import numpy as np
import pytest
import tiny as tiny_builds
import torch
from drafting import loaded
from kit_runner.figures import relative_error

from shardmill.gates.passes import schedules
from shardmill.gates.stack import feed
from shardmill.models.architecture import blocks
from shardmill.models.families import qwen3_5_text
from shardmill.models.families.qwen3_5_text import STREAM_SCALE
from shardmill.runtime.kv import Floats

from . import tiny_families as tiny
from .test_family_mutants import LIMIT as GATE
from .test_family_mutants import Mutation, error, graph, sources
from .tiny_configs import tiny_config


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model counts as a wide one."""
    monkeypatch.setattr(qwen3_5_text, "WIDE", 64)


@pytest.mark.usefixtures("wide")
def test_a_scaled_stream_computes_what_transformers_computes() -> None:
    """In passes of every width, and with drafts that are rejected."""
    model, tokens = tiny.tiny_model("qwen3_5_text"), tiny.tiny_text()
    truth, engine = tiny.expected(model, tokens), tiny.Blocks(tiny.described(model), tiny.tensors_of(model))
    found: Any = engine
    for name, schedule in schedules(len(tokens), engine.verify, engine.tokens_max).items():
        limits.rows_agree(name, feed(found, tokens, schedule), truth, tiny.limit_of(model))


def test_the_stream_is_what_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's output is a 32nd; keys, values, rings and states are the same."""
    model, tokens, kept = tiny.tiny_model("qwen3_5_text"), tiny.tiny_text()[:16], []
    for width in (5120, 64):
        monkeypatch.setattr(qwen3_5_text, "WIDE", width)
        engine = tiny.Blocks(tiny.described(model), tiny.tensors_of(model))
        streams: list[torch.Tensor] = []
        for layer in engine.layers.layers.values():
            layer.register_forward_hook(lambda module, given, out, streams=streams: streams.append(out.clone()))
        for start in range(0, 16, 4):
            engine.forward(tokens[start : start + 4], range(start, start + 4), range(start, start + 4))
        caches = {name: each for name, each in engine.layers.named_buffers() if re.fullmatch(r"[ckvs]_\d", name)}
        assert len(caches) == 8 and all(each.any() for each in caches.values())
        kept.append((streams, caches.values()))
    (plain, plain_caches), (scaled, caches_beside) = kept
    pairs = [*zip(plain, (32 * each for each in scaled), strict=True), *zip(plain_caches, caches_beside, strict=True)]
    for one, other in pairs:
        limits.numbers_agree("the stream or a cache", other, one, tiny.limit_of(model))


def test_no_matrix_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """INT8 gives the same integers and scales: only the table and gains have other numbers."""
    config = tiny_config("qwen3_5_text")
    plain = qwen3_5_text.describe(config, 64)
    monkeypatch.setattr(qwen3_5_text, "WIDE", 64)
    scaled = qwen3_5_text.describe(config, 64)
    changed = {path for path, each in plain.sources.items() if each != scaled.sources[path]}
    assert changed == {"embedding", *(f"layers.{i}.linear_attn.norm.weight" for i in (0, 1, 3))}
    for path in changed:
        pairs = zip(blocks(plain.sources[path]), blocks(scaled.sources[path]), strict=True)
        assert all(replace(one, times=one.times / 32) == other for one, other in pairs)


MUTANTS: dict[str, Mutation] = {
    "branches that are not scaled": graph(output_scale=1.0),
    "an epsilon that is not scaled": graph(stream_scale=1.0),
    "an embedding that is not scaled": sources("embedding", times=1.0),
    "a gain that is not scaled": sources("linear_attn.norm.weight", times=1.0),
}


@pytest.mark.thorough(but=["an epsilon that is not scaled"])
@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found_out(name: str) -> None:
    assert error("qwen3_5_text", MUTANTS[name]) > GATE


@pytest.mark.parametrize(("width", "experts", "scale"), [(4096, 0, 1.0), (5120, 0, STREAM_SCALE), (5120, 8, 1.0)])
def test_only_the_size_that_needs_it_has_it(width: int, experts: int, scale: float) -> None:
    family = "qwen3_5_moe_text" if experts else "qwen3_5_text"
    config = tiny_config(family, hidden_size=width, **({"num_experts": experts} if experts else {}))
    assert qwen3_5_text.stream_scale(config) == scale


def computed(model: Any, tokens: list[int], folder: Path, form: str, precisions: list[str]) -> list[Floats]:
    """The logits [tokens, V] of a build's programs, in each of these precisions."""
    source = tiny_builds.fetched(mtp_layers.write(model, {}, folder / "checkpoint"), folder / "source")
    build, found = tiny_builds.converted(source, folder, quantization=form, topology=[[0, 2], [2, 4]]), []
    for precision in precisions:
        engine = loaded(build, folder / precision, precision)
        found.append(np.concatenate([engine.forward([token], [p], [p]) for p, token in enumerate(tokens)]))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="needs the portable engine in fp16")
@pytest.mark.parametrize("width", [64, 5120])
def test_fp16_holds_a_stream_beyond_its_range_only_if_it_is_scaled(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer's MLP puts numbers of 200,000 into the stream."""
    model = mtp_layers.target()
    with torch.no_grad():
        tokens, streams = list(tiny.tiny_text()[:24]), list[float]()
        layer = model.model.layers[1]
        layer.mlp.down_proj.weight.mul_(128)
        layer.mlp.up_proj.weight.mul_(512)
        layer.register_forward_hook(lambda module, given, out: streams.append(float(out[0].abs().max())))
        truth = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    assert 1e5 < streams[-1] < 32 * 65504
    monkeypatch.setattr(qwen3_5_text, "WIDE", width)
    (got,) = computed(model, tokens, tmp_path, "fp16", ["fp16"])
    if width == 5120:
        assert not np.isfinite(got).all()
    else:
        limits.rows_agree("logits in fp16", got, truth, limits.model(4, 1, "fp16"))  # it sums in a wider format


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="needs the portable engine's emulation of the Neural Engine")
def test_with_int8_the_scale_costs_no_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the emulated Neural Engine computes: its sums are of codes, which the scale leaves large enough."""
    model, errors = mtp_layers.target(), list[float]()
    for width in (5120, 64):
        monkeypatch.setattr(qwen3_5_text, "WIDE", width)
        exact, predicted = computed(model, list(tiny.tiny_text()[:24]), tmp_path / str(width), "int8", ["fp32", "ane"])
        errors.append(relative_error(predicted, exact))
    plain, scaled = errors
    assert scaled < 1.5 * plain
