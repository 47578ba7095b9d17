"""The choice of experts inside a program is topk's: exactly k, the same ones, the lower index of equal scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardmill.models.architecture import Experts
from shardmill.models.mixture import route, step, top_k_mask

TOKENS, TIES = 100_000, 1_000


def order_of(count: int) -> Tensor:
    """The constant of the programs, [1, count, 1, 1]."""
    return torch.arange(count, 0, -1).float().reshape(1, count, 1, 1)


def lowest_first(scores: Tensor, chosen: int) -> Tensor:
    """torch's own choice [1, count, T, 1], among equal scores by a stable sort."""
    ranked = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :chosen]
    return torch.zeros_like(scores).scatter(1, ranked, 1.0)


@pytest.mark.thorough(but=["8-1", "8-2", "16-4", "17-4", "32-8"])
@pytest.mark.parametrize("chosen", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [8, 16, 17, 32, 128])
def test_exactly_k_experts_and_the_same_as_topk(count: int, chosen: int) -> None:
    """In fp16, with ties among the first that count: drawn from few values for some of the tokens."""
    torch.manual_seed(count * chosen)
    scores = torch.randn(1, count, TOKENS, 1).half()
    coarse = torch.arange(TOKENS) % 10 == 0
    scores[:, :, coarse] = (scores[:, :, coarse] * 2).round() / 2
    mask = top_k_mask(scores, order_of(count).half(), chosen)
    assert mask.dtype == torch.float16
    assert torch.equal(mask.sum(dim=1), torch.full((1, TOKENS, 1), chosen).half())
    assert torch.equal(mask, lowest_first(scores, chosen))
    best = torch.topk(scores.float(), min(chosen + 1, count), dim=1).values
    tied = (best[:, 1:] == best[:, :-1]).any(dim=1)
    assert int(tied.sum()) >= TIES
    same = torch.topk(scores.float(), chosen, dim=1).values.sum(dim=1)
    torch.testing.assert_close((mask.float() * scores.float()).sum(dim=1), same)


def test_a_step_is_exact_for_the_least_difference() -> None:
    """A subnormal difference in fp16, and one of close probabilities in fp32, count as any other."""
    least = torch.tensor([2.0**-24, -(2.0**-24), 0.0]).half()
    assert step(least).tolist() == [1.0, 0.0, 0.0]
    assert step(torch.tensor([2.0**-50, 0.0, -1.0, 6e4])).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_bias_of_the_choice_leaves_the_weights_alone() -> None:
    """An expert that only its bias brings in counts with its own score."""
    logits = torch.tensor([2.0, 1.0, 0.0]).reshape(1, 3, 1, 1)
    bias = torch.tensor([0.0, 0.0, 5.0]).reshape(1, 1, 3, 1)
    options = Experts(3, 1, 8, scores="sigmoid", normalised=False, choice_bias=True)
    assert route(logits, order_of(3), options, bias).flatten().tolist() == [0.0, 0.0, 0.5]


def test_a_token_may_skip_all_experts() -> None:
    """The class that stands for no expert takes the token, whose weights are then all 0."""
    logits = torch.tensor([0.0, 1.0, 3.0]).reshape(1, 3, 1, 1)
    options = Experts(2, 1, 8, normalised=False, skips=True)
    assert route(logits, order_of(3), options).flatten().tolist() == [0.0, 0.0]
