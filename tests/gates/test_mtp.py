"""An MTP layer's parts as they ship: planned, converted and judged by transformers' modules."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import limits
import mtp_layers
import pytest
import tiny
import torch
from drafting import agreement, expected, judged
from torch import Tensor

from shardmill.gates import measurement, mtp
from shardmill.gates.reference import checkpoint_weights
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models.families import qwen3_5_text
from shardmill.models.interface import DRAFT_PARTS
from shardmill.runtime.drafter import DrafterEngine


@torch.no_grad()
def test_the_reference_is_the_published_arithmetic(tmp_path: Path) -> None:
    """transformers' modules, joined by the gate, against the formulas written out in tests/mtp_layers.py."""
    model = mtp_layers.target()
    weights = mtp_layers.drawn(model)
    source = mtp_layers.write(model, weights, tmp_path)
    layer = mtp.load_mtp(source, checkpoint_weights(source), 256, tied=True)
    states = model.model(torch.tensor([range(1, 21)]), output_hidden_states=True).last_hidden_state[0]
    embedded = model.model.embed_tokens(torch.arange(2, 22))
    expected = mtp_layers.published(weights, model.config, embedded, states)
    found = layer.logits(layer(layer.join(embedded, states)))
    limits.rows_agree("logits", found, expected @ model.lm_head.weight.T, limits.model(1, 128))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "scaled stream"])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    folder, model = tmp_path_factory.mktemp("mtp"), mtp_layers.target()
    source = tiny.fetched(mtp_layers.write(model, mtp_layers.drawn(model), folder / "checkpoint"), folder / "source")
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(qwen3_5_text, "WIDE", 64)
        return tiny.converted(source, folder, **mtp_layers.SETTINGS)


@pytest.fixture(scope="module")
def known(build: tiny.Build) -> Mapping[str, Tensor]:
    """Return what the reference step keeps: the inputs of all layers, and the last layer's output."""
    model = tiny.transformers_model(build.source)
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, a, out: outputs.append(out[0])) for layer in model.model.layers]
    with torch.no_grad():
        embedded = model.model.embed_tokens(torch.tensor(build.text[:40]))
        model(torch.tensor([build.text[:40]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    rows = [each if each.ndim == 2 else each[0] for each in outputs]
    return {"hidden": torch.stack([embedded, *rows])}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
@pytest.mark.parametrize("name", DRAFT_PARTS)
def test_every_part_passes_its_gate(build: tiny.Build, known: Mapping[str, Tensor], tmp_path: Path, name: str) -> None:
    rows = judged(build, known, tmp_path, name)
    measurement.demand(name, rows)
    assert {"program_error", "width_error", "psnr"} <= {row["name"] for row in rows}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
@pytest.mark.parametrize("wrong", ["an unnormed state", "halves of fc changed over", "no rotation"])
def test_a_wrong_layer_fails(
    build: tiny.Build, known: Mapping[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """The reference deviates as a wrong program would: the gate sees it."""
    load = mtp.load_mtp

    def deviating(*args: Any, **more: Any) -> Any:
        layer = load(*args, **more)
        if wrong == "an unnormed state":
            layer.model_norm = torch.nn.Identity()
        elif wrong == "no rotation":
            turns = layer.rotary
            layer.rotary = torch.nn.Module()
            layer.rotary.forward = lambda x, at: turns(x, torch.zeros_like(at))
        else:
            layer.fc.weight.copy_(layer.fc.weight.roll(layer.fc.weight.shape[0], 1))
        return layer

    monkeypatch.setattr(mtp, "load_mtp", deviating)
    rows = judged(build, known, tmp_path, "draft_layers" if wrong == "no rotation" else "draft_fuse")
    assert "program_error" in [row["name"] for row in rows if not row["passed"]]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
def test_the_chain_drafts_what_the_reference_drafts(build: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both precisions; and not where a further step reads the model's state instead of the layer's own."""
    truth = expected(build)
    for precision in ("fp32", "fp16"):
        found = agreement(build, truth, precision)
        assert found.value == 1.0, found.detail
        assert sum(truth.gaps.flat > truth.margins[precision]) > truth.gaps.size / 2 > 15
    monkeypatch.setattr(DrafterEngine, "follow", lambda self, known: setattr(self, "known", known + 1))
    found = agreement(build, truth)
    assert not THRESHOLDS[found.name].holds(found.value), found.detail
