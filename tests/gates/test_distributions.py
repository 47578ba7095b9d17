"""Distributions are compared row by row, and close calls of the original count apart."""

from __future__ import annotations

import torch

from shardmill.gates.distributions import POSITIONS, clear_agreement, compare_distributions
from shardmill.gates.measurement import Measurement, NotRun

VOCAB = 16


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log_softmax(-1)


def top1(original: torch.Tensor, shipped: torch.Tensor) -> Measurement:
    found = clear_agreement(
        "top1_agreement", compare_distributions(original, shipped), "{} clear positions", "undecided"
    )
    assert isinstance(found, Measurement)
    return found


def test_distributions_are_compared_row_by_row_however_many_there_are() -> None:
    """Blocks of positions save memory and change nothing but the last digits."""
    random = torch.Generator().manual_seed(0)
    original, shipped = torch.randn(2, 2 * POSITIONS + 5, VOCAB, generator=random)
    following = torch.randint(VOCAB, (len(original),), generator=random)
    found, p, q = compare_distributions(original, shipped, following), original.log_softmax(-1), shipped.log_softmax(-1)
    torch.testing.assert_close(found.divergence, (p.exp() * (p - q)).sum(-1))
    torch.testing.assert_close(found.loss, torch.nn.functional.cross_entropy(original, following, reduction="none"))
    torch.testing.assert_close(
        found.shipped_loss, torch.nn.functional.cross_entropy(shipped, following, reduction="none")
    )
    assert torch.equal(found.agree, original.argmax(-1) == shipped.argmax(-1))


def test_top1_counts_close_calls_apart() -> None:
    original = logits([5, 0, 0], [0, 5, 0], [1.05, 1, 0], [0, 0, 5])
    shipped = logits([5, 0, 0], [5, 0, 0], [1, 1.05, 0], [0, 0, 5])
    found = top1(original, shipped)
    assert found.value == torch.tensor(2 / 3)
    assert found.detail == "3 clear positions; 0 of 1 others agree"


def test_a_margin_counts_from_a_tenth_of_a_nat() -> None:
    assert top1(logits([0.11, 0, -9]), logits([0, 0.11, -9])).value == 0
    close = logits([0.11, 0, -9], [0.09, 0, -9]), logits([0.11, 0, -9], [0, 0.09, -9])
    assert top1(*close).detail == "1 clear positions; 0 of 1 others agree"


def test_an_original_that_is_decided_nowhere_is_not_asked_for_top1() -> None:
    """It would be the share of nothing, by which a sound program failed."""
    compared = compare_distributions(logits([0.09, 0, -9]), logits([0, 0.09, -9]))
    assert clear_agreement("top1_agreement", compared, "{}", "no position") == NotRun("top1_agreement", "no position")
