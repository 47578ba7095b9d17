"""The parity gates on models whose experts the host routes to: sound ones pass, and each fault is told by a gate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import routed
import tiny
import torch
import verdicts
from torch import Tensor

from shardmill.gates.routed import Call, taken_in_turn
from shardmill.models import blocks, mixture
from shardmill.runtime import engine

from . import judged
from .test_faults import caught

pytestmark = [
    pytest.mark.skipif(
        sys.platform == "darwin", reason="question 1 is the portable engine's; Core ML itself computes in fp16 only"
    ),
    pytest.mark.slow,
]
FIRST, GROUP = "layers_00_01", "experts_00_1"


Builds = Callable[[str], tiny.Build]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Makes the build of a family, once."""

    @cache
    def made(model_type: str) -> tiny.Build:
        folder: Path = tmp_path_factory.mktemp(model_type)
        source = routed.checkpoint(model_type, folder)
        return routed.build(source, folder / "build", routed.GROUPS[model_type])

    return made


@pytest.fixture(params=["granitemoe", "granitemoehybrid", "zaya", "qwen3_5_moe_text", "qwen3_moe", "gpt_oss"])
def build(request: pytest.FixtureRequest, builds: Builds) -> tiny.Build:
    """A build of each way in which experts lie in a checkpoint."""
    return builds(request.param)


@pytest.fixture
def granite(builds: Builds) -> tiny.Build:
    """A multiplier on the branch."""
    return builds("granitemoe")


@pytest.fixture
def zaya(builds: Builds) -> tiny.Build:
    """Scaled residuals, and a router's state."""
    return builds("zaya")


def test_every_sound_part_passes(build: tiny.Build) -> None:
    layers = [part.name for part in build.layers()]
    groups = [part.name for part in build.parts.values() if part.kind == "experts"]
    for name in (layers[0], layers[-1], groups[0], groups[-1]):
        rows = {row["name"]: row for row in judged.part(build, name)}
        assert {"weight_steps", "program_error", "width_error", "psnr"} <= set(rows)
        verdicts.all_pass(rows.values())
        assert ("experts_agreement" in rows) is name.startswith("layers")


def test_a_sound_stack_passes(build: tiny.Build) -> None:
    """Its tensors are put together of what lies in several packages."""
    rows = {row["name"]: row for row in judged.undisturbed(build)}
    assert {"program_error", "width_error", "rejected_draft_error", "speculation_mismatches"} <= set(rows)
    verdicts.all_pass(rows.values())


@pytest.mark.parametrize(("experts", "state"), [("dense", "host"), (3, "graph"), (3, "host")])
def test_a_sound_stack_passes_with_several_blocks_of_a_recurrence(
    tmp_path: Path, experts: int | str, state: str
) -> None:
    """Mamba-2 with experts beside an MLP, in passes of two blocks; tokens that fill a pass up take experts too."""
    kinds = ["linear_attention", "full_attention"]
    source = routed.checkpoint("granitemoehybrid", tmp_path, num_hidden_layers=2, layer_types=kinds)
    program = {"shapes": "fixed", "state": state}
    build = routed.build(source, tmp_path / "build", experts, tokens={"max": 16, "verify": 4}, program=program)
    rows = judged.undisturbed(build)
    assert {row["detail"] for row in rows} >= {"T=16", "mixed", "padded", "rejected drafts"}
    verdicts.all_pass(rows)


def test_a_sound_stack_passes_as_shipped(granite: tiny.Build) -> None:
    assert {"kl", "top1_agreement"} <= {row["name"] for row in judged.whole(granite)}


Joined = Callable[..., Any]


def forgotten(joined: Joined) -> Joined:
    """The last group is never called."""
    return lambda hidden, width, stream, experts: joined(hidden, width, stream, experts[:-1])


def unweighed(joined: Joined) -> Joined:
    """Experts are called, and their weights are taken for 1."""

    def whole(program: Any) -> Any:
        return lambda given: program({**given, "weights": (given["weights"] > 0).astype("float32")})

    return lambda hidden, width, stream, experts: joined(hidden, width, stream, [(whole(p), n) for p, n in experts])


def twice(joined: Joined) -> Joined:
    """Every group adds the residual stream once more."""

    def adding(program: Any, x: Any) -> Any:
        return lambda given: program(given) + x

    return lambda hidden, width, stream, experts: joined(
        hidden, width, stream, [(adding(p, hidden[:, :stream]), n) for p, n in experts]
    )


def exchanged(joined: Joined) -> Joined:
    """Groups get each other's weights."""
    return lambda hidden, width, stream, experts: joined(hidden, width, stream, experts[::-1])


@pytest.mark.parametrize("mistake", [forgotten, unweighed, twice, exchanged])
def test_a_host_that_adds_otherwise(
    granite: tiny.Build, mistake: Callable[[Joined], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "joined", mistake(engine.joined))
    with caught("program_error"):
        judged.undisturbed(granite)


def test_a_group_that_leaves_out_the_weights(
    granite: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = mixture.ExpertSum.total
    monkeypatch.setattr(mixture.ExpertSum, "total", lambda self, x, weight: total(self, x, weight * 0 + 1))
    with caught("program_error"):
        judged.part(granite, GROUP, judged.converted(granite, GROUP, tmp_path / "wrong.mlpackage"))


def test_a_group_without_its_branchs_multiplier(granite: tiny.Build, tmp_path: Path) -> None:
    graph = replace(granite.parts[GROUP].spec.graph, branch_scale=1.0)
    with caught("program_error"):
        judged.part(granite, GROUP, judged.converted(granite, GROUP, tmp_path / "wrong.mlpackage", graph=graph))


def test_a_group_of_other_experts(granite: tiny.Build, tmp_path: Path) -> None:
    """Its weights are sound where they stand, which is another group's place."""
    other = granite.parts["experts_00_0"]
    package = judged.converted(granite, GROUP, tmp_path / "wrong.mlpackage", tensors=other.tensors)
    with caught("weight_steps", "psnr"):
        judged.part(granite, GROUP, package)


def test_a_layer_that_scales_what_it_does_not_have(
    zaya: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual stream in the place of the experts' sum, which the host is to add."""
    scaled = blocks.Layer.scaled

    def doubled(layer: Any, *given: Any) -> Tensor:
        last = layer.post_mlp_residual_scale
        last.forward = lambda _, stream: blocks.ResidualScale.forward(last, stream, stream)
        return scaled(layer, *given)

    monkeypatch.setattr(blocks.Layer, "scaled", doubled)
    with caught("program_error"):
        judged.part(zaya, FIRST, judged.converted(zaya, FIRST, tmp_path / "wrong.mlpackage"))


def test_a_layer_that_hands_on_no_router_state(
    zaya: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = mixture.ExpertChoice.forward

    def stateless(self: Any, x: Tensor, order: Tensor, before: Tensor | None = None) -> tuple[Tensor, Any]:
        weight, state = choice(self, x, order, before)
        return weight, None if state is None else state * 0

    monkeypatch.setattr(mixture.ExpertChoice, "forward", stateless)
    with caught("program_error"):
        judged.part(zaya, FIRST, judged.converted(zaya, FIRST, tmp_path / "wrong.mlpackage"))


def test_every_expert_of_a_group_has_its_turn() -> None:
    """With several weights, of which none is 0 or 1: what is not multiplied with one shows."""
    index = torch.zeros(24, 3, dtype=torch.long)
    call = Call(torch.zeros(24, 8), index, torch.ones(24, 3))
    taken, weights = taken_in_turn(4, 9)(call)
    shares = Call(call.hidden, taken, weights).share(4, 9)
    assert shares.shape == (24, 5)
    assert set(taken.flatten().tolist()) == {4, 5, 6, 7, 8}
    assert ((shares > 0).sum(dim=1) == 3).all()
    assert 0 < weights.min() < weights.max() < 1
