"""An assistant's parts as they ship: planned, converted and judged by transformers' model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import assistants
import numpy as np
import pytest
import tiny
import torch
from drafting import agreement, expected, judged
from torch import Tensor

from shardmill.gates import assistant, measurement
from shardmill.gates.drafts import Expected
from shardmill.gates.reference import Reference
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models.interface import DRAFT_PARTS
from shardmill.runtime.kv import Floats, KVLayout, attention_mask

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


# The chain of its parts, with the model.


@pytest.fixture(scope="module")
def truth(build: tiny.Build) -> Expected:
    return expected(build)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_chain_drafts_what_transformers_drafts(build: tiny.Build, truth: Expected, precision: str) -> None:
    found = agreement(build, truth, precision)
    assert found.value == 1.0, found.detail
    assert sum(truth.gaps.flat > truth.margins[precision]) > truth.gaps.size / 2 > 15


def seen(later: int, window: int = 0) -> Callable[[Any, int], dict[str, Floats]]:
    """`KVLayout.before` that shows a draft positions further on, or more of the window."""

    def before(layout: KVLayout, position: int) -> dict[str, Floats]:
        at, held = np.asarray([position]), layout.held[: layout.length]
        slots = layout.recent if layout.window_slots else held
        assert layout.window
        return layout._rotary(at) | {
            "attn_mask": attention_mask(held, at - 1 + later),
            "attn_mask_sliding": attention_mask(slots, at - 1 + later, layout.window - 1 + window),
        }

    return before


VIEWS = {"its own slot": seen(1, 1), "a position fewer": seen(-1), "the whole window": seen(0, 60)}


@pytest.mark.parametrize("wrong", VIEWS)
def test_a_wrong_view_of_the_lent_caches_fails(
    build: tiny.Build, truth: Expected, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(KVLayout, "before", VIEWS[wrong])
    found = agreement(build, truth)
    assert not THRESHOLDS[found.name].holds(found.value), found.detail
