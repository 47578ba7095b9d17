"""A head's parts as they ship: planned, converted and judged, and the module that judges against published code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import heads
import limits
import pytest
import tiny
import torch
from drafting import agreement, expected, judged
from safetensors.torch import load_file
from torch import Tensor

from shardmill.gates import drafts, eagle3, measurement, stack
from shardmill.gates.drafts import Expected
from shardmill.gates.measurement import NotRun
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.gates.weights import PackageWeights
from shardmill.models.eagle3 import load_head_config
from shardmill.models.interface import DRAFT_PARTS
from shardmill.runtime import drafter
from shardmill.runtime.drafter import DrafterEngine
from shardmill.runtime.engine import Engine


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
    whole = eagle3.Eagle3Head.forward

    def forward(self: Any, embedded: Tensor, read: Tensor) -> Tensor:
        if wrong == "embedding of the same token":
            return whole(self, embedded.roll(1, 0), read)
        return whole(self, read, embedded) + read - embedded  # each part with the other's norm

    monkeypatch.setattr(eagle3.Eagle3Head, "forward", forward)
    rows = judged(build, known, tmp_path, "draft_layers")
    assert [row["name"] for row in rows if not row["passed"]][:1] == ["program_error"]


# The chain of its parts, with the model.


@pytest.fixture(scope="module")
def truth(build: tiny.Build) -> Expected:
    return expected(build)


CHAIN = pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")


@CHAIN
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_chain_drafts_what_the_reference_drafts(build: tiny.Build, truth: Expected, precision: str) -> None:
    found = agreement(build, truth, precision)
    assert (found.name, found.value) == ("drafts_agreement" + ("_fp16" if precision == "fp16" else ""), 1.0)
    assert sum(truth.gaps.flat > truth.margins[precision]) > 0.7 * truth.gaps.size > 25


def test_the_reference_drafts_what_the_published_code_drafts(build: tiny.Build, truth: Expected) -> None:
    """From the same hidden states; `greedy` knows nothing of rounds, and computes each step by itself."""
    w, parts = heads.read_head(build.source / "drafter"), [part for part in build.parts.values() if part.drafter]
    for part in parts:
        held = PackageWeights(build.packages[part.name], part)
        w |= {t.source.tensor.removeprefix("drafter/"): held(t.source.tensor) for t in part.tensors}
    table = load_file(build.table)["embedding"].float()
    with torch.no_grad():
        model = tiny.transformers_model(build.source, tiny.dequantised(build))
        hidden = model(torch.tensor([list(truth.tokens)]), output_hidden_states=True).hidden_states
    taps = torch.cat([hidden[layer][0] for layer in build.plan["drafter"]["taps"]], dim=-1)
    places = [at for at, _ in drafts.rounds(len(truth.tokens), truth.verify)]
    ours = truth.drafts.tolist()
    assert ours == [heads.greedy(w, table, truth.tokens[:at], taps[: at - 1], len(ours[0]))[0] for at in places]


def test_the_verdict_of_the_stack_has_both_precisions(
    build: tiny.Build, truth: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the program's own measurements, on their engines; a text without room for drafts is said to have none."""
    for name in ("program_and_widths", "cost"):
        monkeypatch.setattr(stack, name, lambda *_: iter(()))
    monkeypatch.setattr(stack, "draft_agreement", lambda engine, expected, precision: (engine, expected, precision))
    states, unread = {"tokens": torch.arange(40), "hidden": torch.zeros(1, 32, 4), "logits": torch.zeros(40, 4)}, Any
    asked: list[int] = []

    def measured(found: Expected | str) -> list[Any]:
        given: Any = lambda tokens: (asked.append(len(tokens)), found)[1]  # noqa: E731
        return list(stack.stack_parity(lambda: "engine", unread, states, given))  # type: ignore[arg-type, return-value]

    assert measured(truth) == [("engine", truth, "fp32"), ("engine", truth, "fp16")] and asked == [32]
    no_room = [NotRun(name, "too short") for name in ("drafts_agreement", "drafts_agreement_fp16")]
    assert measured("too short") == no_room
    assert list(stack.stack_parity(lambda: "engine", unread, states)) == []  # type: ignore[arg-type, return-value]


def shifted_tokens(patch: pytest.MonkeyPatch) -> None:
    known = drafter.drafted_tokens
    patch.setattr(drafter, "drafted_tokens", lambda manifest: known(manifest) - 1)


def fed_with(patch: pytest.MonkeyPatch, change: Callable[[Any, Any], Any]) -> None:
    """The drafter's engine, which looks elsewhere for what the model has left."""
    known = DrafterEngine.fed
    patch.setattr(
        DrafterEngine, "fed", lambda self, tokens, slots, positions: known(self, tokens, change(self, slots), positions)
    )


def read_layers(patch: pytest.MonkeyPatch, *layers: int) -> None:
    known = Engine.hidden

    def hidden(self: Any, *given: Any) -> Any:
        self.read = layers if self.read else ()
        return known(self, *given)

    patch.setattr(Engine, "hidden", hidden)


def knows(patch: pytest.MonkeyPatch, more: int) -> None:
    patch.setattr(DrafterEngine, "follow", lambda self, known: setattr(self, "known", known + more))


WRONG: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "taps of other layers": lambda patch: read_layers(patch, 1, 2, 2),
    "taps in another order": lambda patch: read_layers(patch, 2, 1, 3),
    "a shifted d2t": shifted_tokens,
    "the slot before": lambda patch: fed_with(patch, lambda self, slots: [max(slot - 1, 0) for slot in slots]),
    "the slot after": lambda patch: fed_with(patch, lambda self, slots: [slot + 1 for slot in slots]),
    "a tap where the model has not been": lambda patch: knows(patch, 1),
    "never its own output": lambda patch: knows(patch, 100),
}


@pytest.mark.thorough(
    but=[
        "fp32-taps of other layers",
        "fp32-taps in another order",
        "fp32-a shifted d2t",
        "fp32-the slot before",
        "fp32-the slot after",
        "fp32-a tap where the model has not been",
        "fp32-never its own output",
    ]
)
@CHAIN
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_wrong_chain_fails(
    build: tiny.Build, truth: Expected, monkeypatch: pytest.MonkeyPatch, wrong: str, precision: str
) -> None:
    WRONG[wrong](monkeypatch)
    found = agreement(build, truth, precision)
    assert not THRESHOLDS[found.name].holds(found.value), found.detail
