"""Distributions compared block by block are those compared as a whole, by PyTorch's own functions."""

from __future__ import annotations

import limits
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from shardmill.precision.measured import CLEAR, Figures, Tally

N, VOCAB = 40, 500
SUMMED = limits.sums("fp32", VOCAB, 4)  # exponentials, their sum, its logarithm, and the losses of all tokens


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of two models that mostly agree, some of them large; and the tokens that follow, the last unknown."""
    at = torch.Generator().manual_seed(seed)
    was = torch.randn(N, VOCAB, generator=at) * torch.linspace(0.1, 40, N)[:, None]
    now = was + torch.randn(N, VOCAB, generator=at) * 0.3
    following = torch.randint(0, VOCAB, (N,), generator=at)
    following[-1] = -1
    return was, now, following


def counted(was: Tensor, now: Tensor, following: Tensor, size: int) -> Figures:
    tally = Tally(following)
    for blocks in zip(was.split(size, dim=1), now.split(size, dim=1), strict=True):
        tally.add(*blocks)
    return tally.figures()


@pytest.mark.parametrize("size", [1, 7, 128, VOCAB])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_any_size_add_up_to_the_whole(size: int, seed: int) -> None:
    was, now, following = draw(seed)
    found = counted(was, now, following, size)
    p, q = log_softmax(was.double(), -1), log_softmax(now.double(), -1)
    limits.numbers_agree("divergence", found.kl, kl_div(q, p, log_target=True, reduction="sum"), SUMMED)
    for figure, logits in ((found.before, was), (found.after, now)):
        expected = cross_entropy(logits[:-1].double(), following[:-1], reduction="sum")
        limits.numbers_agree("loss", figure, expected, SUMMED)
    best = p.topk(2, dim=-1)
    clear = best.values[:, 0] - best.values[:, 1] >= CLEAR
    assert (found.decided, found.same) == (int(clear.sum()), int((clear & (q.argmax(-1) == best.indices[:, 0])).sum()))
    assert 0 < found.same < found.decided < N


def test_a_model_is_its_own_equal() -> None:
    was, _, following = draw(0)
    found = counted(was, was, following, 64)
    limits.numbers_agree("divergence", found.kl, 0, limits.sums("fp64", N * VOCAB), size=1)
    assert found.before == found.after and found.same == found.decided
