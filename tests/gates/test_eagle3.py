"""A head's parts as they ship: planned, converted and judged, and the module that judges against published code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import heads
import limits
import pytest
import tiny
import torch
from drafting import judged
from torch import Tensor

from shardmill.gates import eagle3, measurement
from shardmill.models.eagle3 import load_head_config
from shardmill.models.interface import DRAFT_PARTS


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    return tiny.build_with_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def known(build: tiny.Build) -> Mapping[str, Tensor]:
    """Return what the reference step keeps: the hidden states before and after every layer."""
    with torch.no_grad():
        out = tiny.transformers_model(build.source)(torch.tensor([build.text[:40]]), output_hidden_states=True)
    return {"hidden": torch.stack([each[0] for each in out.hidden_states])}


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_judging_module_computes_what_was_published(tmp_path: Path, norm_first: bool) -> None:
    folder = heads.write_head(tmp_path / "head", norm_before_residual=norm_first)
    head, w = eagle3.load_head(folder), heads.read_head(folder)
    embedded, read = torch.randn(2, 20, tiny.HIDDEN, generator=torch.Generator().manual_seed(3))
    out = heads.published(w, embedded, read, norm_first)
    limits.rows_agree("hidden states", head(embedded, read), out, limits.model(1, 2 * tiny.HIDDEN))
    limits.rows_agree("logits", head.logits(out), heads.logits(w, out), limits.sums("fp32", tiny.HIDDEN, limits.HEAD))
    taps = torch.randn(5, 3 * tiny.HIDDEN, generator=torch.Generator().manual_seed(4))
    limits.rows_agree("fused taps", head.fuse(taps), taps @ w["fc.weight"].T, limits.sums("fp32", 3 * tiny.HIDDEN))


@pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
@pytest.mark.parametrize("name", DRAFT_PARTS)
def test_every_part_passes_its_gate(build: tiny.Build, known: Mapping[str, Tensor], tmp_path: Path, name: str) -> None:
    rows = judged(build, known, tmp_path, name)
    measurement.demand(name, rows)
    assert {"program_error", "width_error", "psnr"} <= {row["name"] for row in rows}
    assert ("rejected_draft_error" in {row["name"] for row in rows}) == (name == "draft_layers")


@pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
def test_branches_are_added_to_the_norm_where_a_head_says_so(
    known: Mapping[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tiny.build_with_head(tmp_path, written=heads.speculators(norm_before_residual=True))
    rows = judged(build, known, tmp_path, "draft_layers")
    measurement.demand("draft_layers", rows)
    plain = load_head_config(heads.write_head(tmp_path / "plain"))
    monkeypatch.setattr(eagle3, "load_head_config", lambda _: plain)
    rows = judged(build, known, tmp_path / "again", "draft_layers")
    assert [row["name"] for row in rows if not row["passed"]][:1] == ["program_error"]


@pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
@pytest.mark.parametrize("wrong", ["embedding of the same token", "the stream first"])
def test_a_wrong_head_fails(
    build: tiny.Build, known: Mapping[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """The reference deviates as a wrong program would: the gate sees it."""
    whole = eagle3.ReferenceHead.forward

    def forward(self: Any, embedded: Tensor, read: Tensor) -> Tensor:
        if wrong == "embedding of the same token":
            return whole(self, embedded.roll(1, 0), read)
        return whole(self, read, embedded) + read - embedded  # each part with the other's norm

    monkeypatch.setattr(eagle3.ReferenceHead, "forward", forward)
    rows = judged(build, known, tmp_path, "draft_layers")
    assert [row["name"] for row in rows if not row["passed"]][:1] == ["program_error"]
