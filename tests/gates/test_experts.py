"""Which experts a program chooses is compared with transformers', and a router that chooses others is told."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from models import tiny_families

from shardmill.errors import GateError
from shardmill.gates import experts, measurement, thresholds
from shardmill.gates.experts import Choices

from . import judged
from .test_faults import caught

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="only the portable engine lets values be seen")
FIRST = "layers_00_02"


@pytest.fixture(scope="module", params=["granitemoe", "zaya"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    """A build with experts."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    changes = {"num_hidden_layers": 2} | ({"layer_types": ["hybrid"] * 2} if request.param == "zaya" else {})
    checkpoint = tiny_families.write_tiny(request.param, folder / "checkpoint", **changes)
    source = tiny.fetched(checkpoint, folder / "source")
    return tiny.converted(source, folder, topology=[[0, 2]], head={"slices": 1})


@pytest.mark.thorough(but=["granitemoe"])
def test_a_sound_part_takes_transformers_experts(mixed: tiny.Build) -> None:
    """All of them in fp32, and as shipped all but close calls."""
    rows = {row["name"]: row for row in judged.part(mixed, FIRST)}
    assert rows["experts_agreement"]["value"] == 1.0
    assert rows["experts_agreement_fp16"]["value"] >= thresholds.THRESHOLDS["experts_agreement_fp16"].limit
    assert rows["program_error"]["passed"]


@pytest.mark.thorough
def test_a_program_that_takes_another_expert_too_is_told(mixed: tiny.Build, tmp_path: Path) -> None:
    part = mixed.parts[FIRST]
    assert part.spec.graph.experts is not None
    greedy = replace(
        part.spec.graph, experts=replace(part.spec.graph.experts, chosen=part.spec.graph.experts.chosen + 1)
    )
    package = judged.converted(mixed, FIRST, tmp_path / "wrong.mlpackage", graph=greedy)
    with caught("experts_agreement", "program_error"):
        judged.part(mixed, FIRST, package)


def measured(found: Choices, indices: list[torch.Tensor]) -> measurement.Measurement:
    """What the gate says of choices in fp32."""
    return experts.choice_agreement("experts_agreement", experts.compare_choices(found, indices, "fp32"))


def test_close_calls_are_counted_apart() -> None:
    """Another expert of an equal score is no mistake, and another of a lower score is."""
    scores = torch.tensor([[[2.0, 1.0, 0.0], [1.0, 1.0, 0.0]]])
    chosen = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]])
    found = measured(Choices(chosen, scores), [torch.tensor([[0], [1]])])
    assert (found.value, found.detail) == (1.0, "1 of 2 choices are close calls")
    found = measured(Choices(chosen, scores), [torch.tensor([[1], [1]])])
    assert found.value == 0.0


def test_nan_is_no_close_call() -> None:
    scores = torch.full((1, 1, 3), float("nan"))
    found = measured(Choices(torch.zeros(1, 1, 3), scores), [torch.tensor([[0]])])
    assert (found.value, found.detail) == (0.0, "0 of 1 choices are close calls")


def test_tokens_that_take_every_expert_choose_nothing() -> None:
    everything = torch.ones(1, 1, 2)
    found = measured(Choices(everything, everything), [torch.tensor([[1, 0]])])
    assert (found.value, found.detail) == (1.0, "0 of 1 choices are close calls")


def test_what_a_token_takes_after_a_close_call_that_fell_otherwise_is_counted_apart() -> None:
    """Its next layers get another value. A close call that fell the same excuses nothing, nor does another token's."""
    close, clear = [1.0, 1.0, 0.0], [2.0, 1.0, 0.0]
    scores = torch.tensor([[close, close, clear], [clear, clear, clear]])  # [layers, tokens, classes]
    first = [1.0, 0.0, 0.0]
    found = Choices(torch.tensor([[first] * 3, [first] * 3]), scores)
    fell, wrong = torch.tensor([[1], [0], [0]]), torch.tensor([[1], [0], [0]])
    one = measured(found, [fell, wrong])
    assert (one.value, one.detail) == (1.0, "2 of 6 choices are close calls, 1 come after one that fell otherwise")
    wrong[1] = 1  # the token whose close call fell the same
    assert measured(found, [fell, wrong]).value == pytest.approx(2 / 3)


def test_a_program_is_compared_up_to_a_close_call_that_fell_otherwise() -> None:
    """But not where many calls are close: then the scores themselves are in doubt."""
    scores = torch.tensor([2.0, 1.0, 0.0]).repeat(1, 200, 1)
    scores[0, 150] = torch.tensor([1.0, 1.0, 0.0])
    chosen = torch.tensor([1.0, 0.0, 0.0]).repeat(1, 200, 1)
    truth = torch.zeros(200, 1, dtype=torch.long)
    right = torch.zeros(200, dtype=torch.bool)
    assert experts.compare_choices(Choices(chosen, scores), [truth], "fp32").decided(right) == 200
    truth[150] = 1
    assert experts.compare_choices(Choices(chosen, scores), [truth], "fp32").decided(right) == 150
    truth[20] = 1  # no close call: it counts as it is
    assert experts.compare_choices(Choices(chosen, scores), [truth], "fp32").decided(right) == 150
    scores[0, 100:] = torch.tensor([1.0, 1.0, 0.0])
    assert experts.compare_choices(Choices(chosen, scores), [truth], "fp32").decided(right) == 200


def test_an_expert_on_the_edge_of_sharing_a_softmax_may_end_the_comparison() -> None:
    """SparseMixer's weights jump there, and the sets of experts do not show it: what comes out does."""
    scores = torch.tensor([4.0, 3.0, 1.0, 0.5]).repeat(1, 200, 1)
    chosen, truth = (scores > 2).float(), torch.tensor([[0, 1]] * 200)
    right, wrong = torch.zeros(200, dtype=torch.bool), torch.zeros(200, dtype=torch.bool)
    wrong[120:] = True
    assert experts.compare_choices(Choices(chosen, scores), [truth], "fp32", 0.01).decided(wrong) == 200
    scores[0, 120, 1] = 4.0 - 2 * 0.01 * 4.0  # as far from the best as it may be
    found = experts.compare_choices(Choices(chosen, scores), [truth], "fp32", 0.01)
    assert found.decided(wrong) == 120 and bool(found.same.all())
    assert found.decided(right) == 200  # it fell the same
    wrong[50:] = True  # what was wrong before it is no excuse
    assert found.decided(wrong) == 120
    assert experts.compare_choices(Choices(chosen, scores), [truth], "fp32").decided(wrong) == 200


@pytest.mark.parametrize(("at", "tokens"), [(0, 200), (1, 200), (31, 200), (10, 16)])
def test_a_close_call_that_leaves_few_tokens_is_refused(at: int, tokens: int) -> None:
    """A program that is right for one token is not known to be right; after the first token's call, for none."""
    scores = torch.tensor([9.0, 1.0, 0.0]).repeat(8, tokens, 1)
    scores[0, at] = torch.tensor([1.0, 1.0, 0.0])
    chosen = torch.tensor([1.0, 0.0, 0.0]).repeat(8, tokens, 1)
    truths = [torch.zeros(tokens, 1, dtype=torch.long) for _ in range(8)]
    truths[0][at] = 1
    found = experts.compare_choices(Choices(chosen, scores), truths, "fp32")
    with pytest.raises(GateError, match=rf"at token {at} of {tokens}: .* at least 32 are needed; .* another text"):
        found.decided(torch.zeros(tokens, dtype=torch.bool))
