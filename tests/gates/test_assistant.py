"""An assistant's parts as they ship: planned, converted and judged by transformers' model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import assistants
import pytest
import tiny
import torch
from drafting import judged
from torch import Tensor

from shardmill.gates import assistant, measurement
from shardmill.gates.reference import Reference
from shardmill.models.interface import DRAFT_PARTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only"),
]


@pytest.fixture(scope="module", params=["gemma4_text", "gemma4_unified_text"])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiny.Build]:
    model, helper = assistants.target(request.param), assistants.assistant(request.param)
    yield assistants.build(tmp_path_factory.mktemp("assistant"), model, helper, "int8")


@pytest.fixture(scope="module")
def known(build: tiny.Build) -> Mapping[str, Tensor]:
    """Return what the reference step keeps: the inputs of all layers, and the last layer's output."""
    model = tiny.transformers_model(build.source)
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, a, out: outputs.append(out[0])) for layer in model.model.layers]
    with torch.no_grad():
        found = model(torch.tensor([build.text[:40]]), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    return {"hidden": torch.stack([found[0][0], *outputs])}


@pytest.mark.parametrize("name", DRAFT_PARTS)
def test_every_part_passes_its_gate(build: tiny.Build, known: Mapping[str, Tensor], tmp_path: Path, name: str) -> None:
    rows = judged(build, known, tmp_path, name)
    measurement.demand(name, rows)
    assert {"program_error", "width_error", "psnr"} <= {row["name"] for row in rows}


@pytest.mark.parametrize("wrong", ["the window", "keys for values", "an unnormed state"])
def test_a_wrong_assistant_fails(
    build: tiny.Build, known: Mapping[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """The reference deviates as a wrong program would: the gate sees it."""
    layers = assistant._layers

    def narrower(model: Any, x: Tensor, caches: Any) -> Tensor:
        monkeypatch.setattr(model.model.config, "sliding_window", model.model.config.sliding_window - 1)
        found = layers(model, x, caches)
        monkeypatch.undo()
        return found

    def swapped(model: Any, x: Tensor, caches: Any) -> Tensor:
        return layers(model, x, {name: (values, keys) for name, (keys, values) in caches.items()})

    if wrong == "the window":
        monkeypatch.setattr(assistant, "_layers", narrower)
    elif wrong == "keys for values":
        monkeypatch.setattr(assistant, "_layers", swapped)
    else:
        monkeypatch.setattr(Reference, "normed", lambda self, hidden, weights: hidden)
    part = "draft_fuse" if wrong == "an unnormed state" else "draft_layers"
    rows = judged(build, known, tmp_path, part)
    assert "program_error" in [row["name"] for row in rows if not row["passed"]]
